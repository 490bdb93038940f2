"""Every table made again from the log, beside those that are read."""
