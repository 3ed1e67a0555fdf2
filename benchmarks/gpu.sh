#!/bin/sh
# The first minutes on a machine with a GPU: correctness first, then speed. See benchmarks/gpu.py.
#
#   benchmarks/gpu.sh                        all parts; the same command again goes on
#   benchmarks/gpu.sh --parts packed,fsdp    some of them
#   benchmarks/gpu.sh --again fsdp           one that is done, once more
#   benchmarks/gpu.sh --device cpu --size tiny --parts devices,packed
#
# PYTHON names the interpreter. Nothing is fetched from a network.
set -eu
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export MUJOCO_GL="${MUJOCO_GL:-egl}" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export HF_HUB_OFFLINE=1
# Equal bits of two runs need it; read when CUDA starts.
export CUBLAS_WORKSPACE_CONFIG="${CUBLAS_WORKSPACE_CONFIG:-:4096:8}"
exec "${PYTHON:-python3}" benchmarks/gpu.py "$@"
