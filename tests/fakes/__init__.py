"""Stand-ins for real parts; each passes the contract tests of the part that it stands in for."""
