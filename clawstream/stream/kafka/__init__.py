"""The log on Kafka: clients, topics, access, offsets."""
