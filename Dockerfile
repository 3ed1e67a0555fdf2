# For CPUs:         docker build -t dzrobot --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu .
# For NVIDIA GPUs:  docker build -t dzrobot .
# The demo:         docker run --rm dzrobot
# On a GPU:         docker run --rm --gpus all dzrobot .venv/bin/dzrobot eval --device cuda
FROM debian:bookworm-slim

# SYSTEM_PACKAGES of the Makefile, and what `make` itself needs.
RUN apt-get update \
    && apt-get install -y --no-install-recommends \
        ca-certificates git make python3 python3-venv \
        libegl1 libgl1 libglib2.0-0 libosmesa6 libusb-1.0-0 libudev1 \
    && rm -rf /var/lib/apt/lists/*

RUN useradd --create-home --uid 1000 robot
USER robot
WORKDIR /home/robot/dzrobot

# `make setup` installs the versions of requirements/constraints.txt; torch is chosen here.
# PyPI has the wheels of torch for NVIDIA GPUs; the wheels for CPUs have an index of their own.
ARG TORCH_INDEX=
ARG TORCH="torch==2.13.0"
COPY --chown=robot . .
RUN PIP_EXTRA_INDEX_URL="$TORCH_INDEX" PIP_NO_CACHE_DIR=1 make setup TORCH="$TORCH"

# EGL renders with the GPU's driver if there is one, otherwise with Mesa on the CPU.
ENV MUJOCO_GL=egl
CMD ["make", "demo"]
