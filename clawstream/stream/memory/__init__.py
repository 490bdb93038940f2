"""The log in this process's memory."""
