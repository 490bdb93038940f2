"""Records of the log to rows in Postgres."""
