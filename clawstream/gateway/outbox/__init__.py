"""Records on their way to the log, by way of the disk while the log is away."""
