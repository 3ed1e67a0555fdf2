#!/bin/sh
# Collect what a bare machine with a GPU lacks, in .gpu/ of this checkout: wheels (CPython 3.12,
# x86-64 Linux). Run it where there is a network. Reference numbers come with the checkout; those of
# another folder are brought as well.
#
#   benchmarks/pack_gpu.sh                          DZROBOT_GOLDENS names further reference numbers
#   benchmarks/pack_gpu.sh --goldens DIR torchao    further packages by name
#
# A machine is taken to have torch, transformers, numpy, OpenCV, pyarrow, peft, PyYAML, rich and
# safetensors. PyAV (33 MiB) is left out: recordings are stored as PNG without it. PYTHON names the
# interpreter. Prints the size of everything that travels; above 60 MiB the exit code is 2.
set -eu
cd "$(dirname "$0")/.."
goldens="${DZROBOT_GOLDENS:-}"
if [ "${1:-}" = --goldens ]; then
    [ $# -ge 2 ] || { echo "--goldens wants a folder" >&2; exit 2; }
    goldens="$2"
    shift 2
fi
most=60
rm -rf .gpu
mkdir -p .gpu/wheels
fetch() {
    "${PYTHON:-python3}" -m pip download --quiet --only-binary=:all: --implementation cp --python-version 3.12 \
        --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 --platform manylinux_2_17_x86_64 \
        --platform manylinux2014_x86_64 --platform manylinux1_x86_64 --dest .gpu/wheels "$@"
}
# Pydantic's core has to be the one that it was made for, so these come with what they need.
fetch pydantic ftfy
fetch --no-deps gymnasium farama-notifications diffusers importlib_metadata zipp "$@"
if [ -n "$goldens" ]; then
    ls "$goldens"/head_*.json >/dev/null 2>&1 || { echo "no head_*.json in '$goldens'" >&2; exit 2; }
    mkdir .gpu/goldens
    cp "$goldens"/head_* .gpu/goldens/
fi
mebibytes() { awk '{ total += $1 } END { printf "%.1f", total / 1048576 }'; }
size() { find "$@" -type f -exec stat -c %s {} + 2>/dev/null | mebibytes; }
tree="$(git ls-files -z | xargs -0 stat -c %s | mebibytes)"
wheels="$(size .gpu/wheels)"
numbers="$(size .gpu/goldens)"
all="$(echo "$tree $wheels $numbers" | awk '{ print $1 + $2 + $3 }')"
ls -1s --block-size=KiB .gpu/wheels | sed 1d
printf '%-28s%8s MiB\n' "tracked files" "$tree" ".gpu/wheels" "$wheels" ".gpu/goldens" "$numbers" "travels" "$all"
echo "Bring this checkout and the folder .gpu; there: benchmarks/gpu.sh"
if awk "BEGIN { exit !($all > $most) }"; then
    echo "more than $most MiB: leave packages out" >&2
    exit 2
fi
