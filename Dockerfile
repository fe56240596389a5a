# dlctl with torch, for pods, as `dlctl kubernetes` wants it: docker build -t dlctl .
#
# An image for a job has its files beside: docker build -t me/digits:1 -f Dockerfile.job examples/digits
# with this Dockerfile.job:
#
#     FROM dlctl
#     COPY --chown=1000 . /job
ARG BASE=python:3.12-slim
FROM ${BASE}
# tini ends what the processes of a run leave behind; gcc is for loops in C, which numpy replaces.
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev tini \
    && rm -rf /var/lib/apt/lists/*
COPY . /source
RUN pip install --no-cache-dir "/source[torch,s3,gs]" && rm -rf /source
RUN useradd --non-unique --uid 1000 --create-home dlctl && mkdir /job
USER 1000
WORKDIR /job
ENTRYPOINT ["tini", "--"]
CMD ["dlctl", "--help"]
