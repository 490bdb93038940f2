"""What a client's request says, read and checked."""
