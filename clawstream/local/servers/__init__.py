"""The servers of one machine: Kafka, Postgres, SGLang, and what keeps them."""
