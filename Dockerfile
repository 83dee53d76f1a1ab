# specbench in a container: `docker build -t specbench .`, or with CUDA: `--build-arg DEVICE=cuda`. How to run it:
# docs/how-to/install.md.
ARG DEVICE=cpu

FROM python:3.12-slim-bookworm AS wheel
WORKDIR /src
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY specbench_cli ./specbench_cli
COPY methods ./methods
COPY datasets_cfg ./datasets_cfg
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheel .

FROM python:3.12-slim-bookworm AS base-cpu
# A torch build without the CUDA libraries, which are most of its size.
ENV PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
# OpenMP, for the multi-threaded kernels that Numba compiles.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends libgomp1 \
 && rm -rf /var/lib/apt/lists/*

FROM nvidia/cuda:12.8.1-base-ubuntu24.04 AS base-cuda
# Only the driver interface: torch from PyPI includes the CUDA libraries.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends python3 python3-venv \
 && rm -rf /var/lib/apt/lists/*

# hadolint ignore=DL3006
FROM base-${DEVICE}
RUN --mount=type=bind,from=wheel,source=/wheel,target=/wheel \
    python3 -m venv /opt/specbench \
 && /opt/specbench/bin/pip install --no-cache-dir /wheel/*.whl \
 && useradd --create-home --uid 10001 specbench \
 && install --directory --owner=specbench /work
ENV PATH=/opt/specbench/bin:$PATH
USER 10001
WORKDIR /work
ENTRYPOINT ["specbench"]
