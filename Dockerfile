# bitgraft serve, on a CPU:  docker build -t bitgraft . && docker run -p 8000:8000 -v ./my-store:/store:ro bitgraft
FROM python:3.12-slim AS build
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src src
# The pins are those that tests ran with. With CUDA that is several GB; PyTorch's site names an index of builds for CPUs
# alone, which takes --build-arg TORCH_INDEX=URL (its versions have a suffix of their own, so torch is not pinned then).
ARG TORCH_INDEX=
RUN python -m venv /app \
    && if [ -n "$TORCH_INDEX" ]; then \
        sed -i -E '/^(torch|torchvision|triton|nvidia|cuda)/d' constraints.txt \
        && /app/bin/pip install --no-cache-dir torch torchvision --index-url "$TORCH_INDEX"; \
    fi \
    && /app/bin/pip install --no-cache-dir -c constraints.txt ".[serve]"

FROM python:3.12-slim
RUN useradd --system --uid 10001 --no-create-home bitgraft
COPY --from=build /app /app
ENV PATH=/app/bin:$PATH PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 NUMBA_CACHE_DIR=/tmp/numba
USER bitgraft
WORKDIR /tmp
VOLUME /store
EXPOSE 8000
# Python is here anyway; curl is not.
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/healthz', timeout=4)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["bitgraft", "serve", "--store", "/store", "--host", "0.0.0.0"]
CMD ["--memory-budget", "1GB"]
