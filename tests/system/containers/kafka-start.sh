#!/bin/bash
# KAFKA_LOG_DIRS becomes log.dirs, and so on; the data folder is formatted once, and the broker takes this process's place.
set -eu
settings=/opt/kafka/config/server.properties
(umask 077 && while IFS= read -r -d '' entry; do
  case $entry in
    KAFKA_*=*) name=${entry%%=*} name=${name#KAFKA_} name=${name//_/.}; echo "${name,,}=${entry#*=}" ;;
  esac
done </proc/self/environ >"$settings")
java=(/opt/java/bin/java -Xms64m -Xmx384m -XX:+UseSerialGC -XX:TieredStopAtLevel=1 -cp '/opt/kafka/libs/*')
"${java[@]}" kafka.tools.StorageTool format --ignore-formatted --cluster-id 5L6g3nShT-eMCtK--X86sw --config "$settings"
exec "${java[@]}" kafka.Kafka "$settings"
