#!/bin/sh
# The first minutes on a machine with a GPU: correctness first, then speed. See benchmarks/gpu.py.
#
#   benchmarks/gpu.sh                        all parts; the same command again goes on
#   benchmarks/gpu.sh --parts packed,fsdp    some of them
#   benchmarks/gpu.sh --again fsdp           one that is done, once more
#   benchmarks/gpu.sh --device cpu --size tiny --parts devices,packed
#
# PYTHON names the interpreter. Nothing is fetched from a network: packages that it lacks are taken
# from .gpu/wheels, where benchmarks/pack_gpu.sh has put them for Python 3.12.
set -eu
root="$(cd "$(dirname "$0")/.." && pwd)"
python="${PYTHON:-python3}"
wheels="$root/.gpu/wheels"
paths="$root"
if ls "$wheels"/*.whl >/dev/null 2>&1 && "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))'; then
    site="${TMPDIR:-/tmp}/dzrobot-gpu-$(id -u)"
    if [ ! "$site/installed" -nt "$wheels" ]; then
        rm -rf "$site"
        "$python" -m pip install --quiet --no-index --no-deps --no-compile --target "$site" "$wheels"/*.whl
        touch "$site/installed"
    fi
    paths="$site:$paths"
fi
if [ -z "${DZROBOT_GOLDENS:-}" ] && [ -d "$root/.gpu/goldens" ]; then
    export DZROBOT_GOLDENS="$root/.gpu/goldens"
fi
export PYTHONPATH="$paths${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
export MUJOCO_GL="${MUJOCO_GL:-egl}" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "$python" "$root/benchmarks/gpu.py" "$@"
