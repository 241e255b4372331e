# syntax=docker/dockerfile:1
#
#   docker build -t tandem .
#   export TANDEM_API_KEYS=$(openssl rand -hex 16)
#   docker run --rm --init --shm-size=1g -p 8000:8000 -e TANDEM_API_KEYS tandem
#
# With GPUs: docker run --gpus all ...; another build of torch: docker build --build-arg TORCH="torch==2.13.0 ..."

FROM python:3.11-slim-bookworm AS build
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY tandem tandem
COPY router router
COPY prefill_worker prefill_worker
COPY decode_worker decode_worker
COPY kvtransfer kvtransfer
RUN pip install --no-cache-dir build==1.6.1 && python -m build --wheel --outdir /dist .

FROM python:3.11-slim-bookworm
# With a GPU, Triton compiles its launcher when a worker starts.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
ARG TORCH="torch==2.13.0"
COPY requirements/lock.txt /tmp/lock.txt
# torch first and in a layer of its own: it is large and changes rarely. TORCH may hold options for pip.
RUN pip install --no-cache-dir --constraint /tmp/lock.txt ${TORCH}
COPY --from=build /dist/*.whl /tmp/
# With NIXL's build for CUDA 13 where torch is for that: pages on GPUs need it.
RUN extra=$(python -c 'import torch; print("[cuda13]" * str(torch.version.cuda).startswith("13."))') \
    && pip install --no-cache-dir --constraint /tmp/lock.txt "$(echo /tmp/*.whl)$extra" \
    && rm /tmp/*.whl /tmp/lock.txt

RUN useradd --create-home --uid 1000 tandem
USER tandem
WORKDIR /home/tandem
EXPOSE 8000
# The start loads the model; after that /health answers at once.
HEALTHCHECK --interval=10s --timeout=5s --start-period=180s --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["tandem"]
CMD ["serve", "--host", "0.0.0.0"]
