#!/bin/sh
# On a CUDA machine, from the repository's root: bench/gpu/run.sh [PROGRAM] [FOLDER FOR RESULTS]
# PROGRAM is capture-bench, or capture-bench.xz as it was carried. Needs Python with numpy and gguf. Under five minutes.
set -eu

program=${1:-bench/gpu/capture-bench.xz}
results=${2:-.}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

case $program in
    *.xz) xz -dc "$program" > "$work/capture-bench" ;;
    *) cp "$program" "$work/capture-bench" ;;
esac
chmod +x "$work/capture-bench"

# cuBLAS and the CUDA runtime: where the loader looks, in a toolkit, or in packages beside Python
for library in libcublas.so.13 libcublasLt.so.13 libcudart.so.13; do
    if ! ldconfig -p | grep -q "$library"; then
        found=$(find /usr/local/cuda*/ "$(python3 -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')" \
            -name "$library" 2>/dev/null | head -n 1)
        [ -n "$found" ] || { echo "$library is not on this machine" >&2; exit 1; }
        LD_LIBRARY_PATH=$(dirname "$found")${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
        export LD_LIBRARY_PATH
    fi
done

python3 -m bench.gpu.model "$work/hybrid.gguf"
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
timeout 240 "$work/capture-bench" "$work/hybrid.gguf" | tee "$results/capture-gpu.jsonl"
