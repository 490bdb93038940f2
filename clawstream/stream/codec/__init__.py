"""Events to bytes and back: Avro, schemas, upcasting, headers."""
