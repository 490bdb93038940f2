"""Tables and topics for people: SQL, tail, export."""
