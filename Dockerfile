# iwopd in a container. Everything that is installed is installed by docker/install.sh.
#   docker build --target cpu  --tag iwopd:cpu .
#   docker build --target cuda --tag iwopd:cuda .                                     (needs the NVIDIA container toolkit to run)
#   docker build --target cuda --build-arg EXTRAS="lora data" --tag iwopd:lora .
#   docker run --rm --volume "$PWD:/workspace" iwopd:cpu demo
ARG PYTHON_VERSION=3.12

FROM python:${PYTHON_VERSION}-slim AS base
ENV PYTHONUNBUFFERED=1 \
    HF_HOME=/workspace/.cache/huggingface \
    IWOPD_CACHE=/workspace/.cache/iwopd \
    PATH=/opt/iwopd/bin:$PATH
COPY pyproject.toml README.md LICENSE /source/
COPY src /source/src
COPY docker/install.sh /source/docker/install.sh
RUN useradd --create-home --uid 1000 iwopd && mkdir /workspace && chown iwopd /workspace
WORKDIR /workspace
ENTRYPOINT ["iwopd"]
CMD ["--help"]

FROM base AS cpu
ARG EXTRAS=""
# hadolint ignore=SC2086
RUN /source/docker/install.sh cpu /opt/iwopd /source $EXTRAS
USER 1000

FROM base AS cuda
ARG EXTRAS=""
# hadolint ignore=SC2086
RUN /source/docker/install.sh cuda /opt/iwopd /source $EXTRAS
USER 1000
