# Stands in for postgres:17 where no registry is reached: its variables, folders and first steps are that image's. Its context
# has the programs of the package that embeds Postgres in packages/.
ARG BASE
FROM ${BASE}
COPY packages /opt/packages
COPY --chmod=755 postgres-start.sh /usr/local/bin/start.sh
RUN useradd --uid 999 postgres && install -d -o postgres /var/lib/postgresql/data /var/run/postgresql \
    && mkdir /docker-entrypoint-initdb.d
ARG PROGRAMS
ENV PATH=/opt/packages/${PROGRAMS}:$PATH PGDATA=/var/lib/postgresql/data PGHOST=/var/run/postgresql
VOLUME /var/lib/postgresql/data
STOPSIGNAL SIGINT
ENTRYPOINT ["/usr/local/bin/start.sh"]
