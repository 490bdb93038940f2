#!/bin/bash
# What apache/kafka's tool of this name is asked for: that the broker answers who logs in. The jars here have another tool for it.
exec /opt/java/bin/java -Xmx128m -XX:+UseSerialGC -XX:TieredStopAtLevel=1 -cp '/opt/kafka/libs/*' \
  kafka.admin.ConfigCommand "$@" --describe --entity-type brokers --entity-default
