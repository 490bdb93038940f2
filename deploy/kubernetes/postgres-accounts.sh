#!/bin/sh
# The postgres image runs this once, on an empty volume. What stages write with owns its database and is no superuser;
# CREATEROLE lets it make the account that reads alone. Nobody logs in as the superuser from another container or pod.
set -eu
psql --username "$POSTGRES_USER" --dbname postgres -v ON_ERROR_STOP=1 -v password="$POSTGRES_PASSWORD" <<'SQL'
CREATE ROLE clawstream LOGIN NOSUPERUSER CREATEROLE PASSWORD :'password';
CREATE DATABASE clawstream OWNER clawstream;
ALTER ROLE CURRENT_USER PASSWORD NULL;
SQL
