# One image for every process: the command says which. Plain Dockerfile syntax: any builder can build it.
#
#   docker build -t atoll .
#   docker build -t atoll --build-arg BASE_IMAGE=registry.example.com/python:3.12-slim .
#   docker build -t atoll --build-arg EXTRA=cuda12 .        islands that train on NVIDIA GPUs; EXTRA=tpu: on TPUs
#   docker build -t atoll-torch --build-arg LOCK=requirements-torch.lock .    with PyTorch and CUDA, for islands.hf:task
#
# The base image needs Python 3.11 or newer with venv, and has 1.1 GB added to it, with PyTorch 9 GB. CUDA libraries come
# as wheels; the host gives the driver. An image of an accelerator's vendor serves as the base if it has such a Python. Nothing runs as root, and nothing is written outside /var/lib/atoll (the store, checkpoints, what is fetched), /etc/atoll (keys)
# and /tmp. Whatever the working directory, the program is found: a folder of yours may be that.
ARG BASE_IMAGE=python:3.12-slim

FROM ${BASE_IMAGE} AS build
ARG EXTRA=""
ARG LOCK=requirements-runtime.lock
WORKDIR /build
COPY requirements-*.lock ./
# Every file is verified against the hashes in the lock, which has what runs need and no tools of development (those with
# PyTorch have them, too). requirements-torch-cpu.lock is for where pip finds a torch for CPUs.
RUN python3 -m venv /opt/atoll \
    && /opt/atoll/bin/pip install --no-cache-dir --disable-pip-version-check --require-hashes -r ${LOCK}
# The plugin for an accelerator is not in the lock; it is the one for the very JAX that is.
RUN if [ -n "${EXTRA}" ]; then \
        jax="$(/opt/atoll/bin/python -c 'from importlib.metadata import version; print(version("jax"))')" \
        && /opt/atoll/bin/pip install --no-cache-dir --disable-pip-version-check "jax[${EXTRA}]==${jax}"; \
    fi

ARG BASE_IMAGE
FROM ${BASE_IMAGE}
RUN groupadd --system --gid 10001 atoll \
    && useradd --system --uid 10001 --gid atoll --home-dir /tmp --no-create-home atoll \
    && mkdir -p /var/lib/atoll /etc/atoll \
    && chown atoll:atoll /var/lib/atoll /etc/atoll
COPY --from=build /opt/atoll /opt/atoll
WORKDIR /srv/atoll
COPY . .
# Nothing is compiled later, and each health check would be a fifth slower.
RUN python3 -m compileall -q .
ENV PATH=/opt/atoll/bin:$PATH \
    ATOLL_NO_VENV=1 \
    HF_HOME=/var/lib/atoll/huggingface \
    HOME=/tmp \
    JAX_COMPILATION_CACHE_DIR=/tmp/jax \
    NUMBA_CACHE_DIR=/var/lib/atoll/numba \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONPATH=/srv/atoll \
    PYTHONUNBUFFERED=1
USER 10001:10001
VOLUME /var/lib/atoll
ENTRYPOINT ["python3", "-m", "ops"]
CMD ["--help"]
