#!/bin/bash
# As root: gives its folders to its user, and becomes it. On an empty folder it makes a database, and runs what is in
# /docker-entrypoint-initdb.d against a server that listens on no network.
set -eu
if [ "$(id -u)" = 0 ]; then
  chown -R postgres "$PGDATA" /var/run/postgresql
  chmod 700 "$PGDATA"
  exec setpriv --reuid postgres --regid postgres --clear-groups "$0"
fi
export POSTGRES_USER=${POSTGRES_USER:-postgres}
sockets=(-c unix_socket_directories=/var/run/postgresql)
if [ ! -s "$PGDATA/PG_VERSION" ]; then
  initdb --encoding UTF8 --no-locale --username "$POSTGRES_USER" --pwfile <(echo "$POSTGRES_PASSWORD") --auth-local trust --auth-host scram-sha-256
  echo 'host all all all scram-sha-256' >>"$PGDATA/pg_hba.conf"
  pg_ctl -D "$PGDATA" -w -o "-c listen_addresses= ${sockets[*]}" start
  [ "${POSTGRES_DB:-postgres}" = postgres ] || createdb --username "$POSTGRES_USER" "$POSTGRES_DB"
  for script in /docker-entrypoint-initdb.d/*.sh; do
    [ ! -e "$script" ] || sh "$script"
  done
  pg_ctl -D "$PGDATA" -m fast -w stop
fi
exec postgres -D "$PGDATA" -c 'listen_addresses=*' "${sockets[@]}"
