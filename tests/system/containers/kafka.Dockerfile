# Stands in for apache/kafka where no registry is reached: its settings come from KAFKA_* variables, its user and its folders are
# that image's. Its context has the broker's jars in jars/ and a Java in java/.
ARG BASE
FROM ${BASE}
COPY java /opt/java
COPY jars /opt/kafka/libs
COPY --chmod=755 kafka-start.sh /opt/kafka/start.sh
COPY --chmod=755 kafka-ask.sh /opt/kafka/bin/kafka-broker-api-versions.sh
RUN useradd --uid 1000 appuser && install -d -o appuser /var/lib/kafka/data /opt/kafka/config
USER appuser
VOLUME /var/lib/kafka/data
ENTRYPOINT ["/opt/kafka/start.sh"]
