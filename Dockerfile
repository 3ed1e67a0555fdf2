# For processors:   docker build -t dzrobot --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu .
# For NVIDIA GPUs:  docker build -t dzrobot .
# The demo:         docker run --rm dzrobot
# On a GPU:         docker run --rm --gpus all dzrobot .venv/bin/dzrobot eval --device cuda
FROM debian:bookworm-slim

# The same libraries as SYSTEM_PACKAGES in the Makefile, and what `make` needs itself.
RUN apt-get update \
    && apt-get install -y --no-install-recommends \
        ca-certificates git make python3 python3-venv \
        libegl1 libgl1 libglib2.0-0 libosmesa6 libusb-1.0-0 libudev1 \
    && rm -rf /var/lib/apt/lists/*

RUN useradd --create-home --uid 1000 robot
USER robot
WORKDIR /home/robot/dzrobot

# The wheels of torch for processors lie in an index of their own; those for NVIDIA GPUs on PyPI.
ARG TORCH_INDEX=
ARG TORCH="torch==2.13.0"
COPY --chown=robot . .
RUN PIP_EXTRA_INDEX_URL="$TORCH_INDEX" PIP_NO_CACHE_DIR=1 make setup TORCH="$TORCH"

# A graphics card's driver renders with EGL; without one Mesa does.
ENV MUJOCO_GL=egl
CMD ["make", "demo"]
