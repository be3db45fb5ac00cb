# One image for both: the command says what a container is.
#
#   docker build --tag fedpareto:0.2.0.dev0 .                                     coordinator, administration
#   docker build --tag fedpareto:0.2.0.dev0 --build-arg EXTRAS=objects .          coordinator whose blobs are in a bucket
#   docker build --tag fedpareto:0.2.0.dev0-torch --build-arg EXTRAS=torch .      workers, and hosts that submit runs
#   docker build --tag fedpareto:0.2.0.dev0-torch-cpu --build-arg EXTRAS=torch --build-arg TORCH_BACKEND=cpu .
#                                                                            the same without a GPU: gigabytes less
#
# Without PyTorch the image stays small; a worker needs it, and so does the making of an initial model. Several extras
# are separated by commas; `preference` is in every image. The libraries are one layer, and the code is another one: a
# change of the code does not ship the libraries again.

FROM python:3.11.14-slim-bookworm AS libraries
ARG EXTRAS=""
ARG TORCH_BACKEND=""
WORKDIR /src
COPY pyproject.toml constraints.txt ./
RUN python -m venv /opt/fedpareto \
    && pip install --no-cache-dir --constraint constraints.txt uv \
    && set -- ${TORCH_BACKEND:+--torch-backend "$TORCH_BACKEND"} \
    && for extra in preference $(echo "$EXTRAS" | tr , " "); do set -- "$@" --extra "$extra"; done \
    && uv pip install --python /opt/fedpareto --no-cache-dir --compile-bytecode --constraint constraints.txt \
        "$@" --requirements pyproject.toml

FROM libraries AS code
COPY README.md LICENSE ./
COPY federation federation
COPY storage storage
COPY coordinator coordinator
COPY worker worker
COPY verification verification
COPY fedpareto fedpareto
RUN /opt/fedpareto/bin/pip install --no-cache-dir --constraint constraints.txt --no-deps --prefix /opt/code .

FROM python:3.11.14-slim-bookworm
LABEL org.opencontainers.image.title="fedpareto" \
      org.opencontainers.image.description="Coordinator and worker of a federation" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN groupadd --gid 10001 fedpareto \
    && useradd --uid 10001 --gid 10001 --home-dir /var/lib/fedpareto --create-home --shell /usr/sbin/nologin fedpareto
COPY --from=libraries /opt/fedpareto /opt/fedpareto
COPY --from=code /opt/code /opt/fedpareto
COPY docker/healthcheck.py /opt/fedpareto/healthcheck.py
ENV PATH="/opt/fedpareto/bin:$PATH" \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /var/lib/fedpareto
VOLUME ["/var/lib/fedpareto"]
EXPOSE 7443 7444
HEALTHCHECK --interval=30s --timeout=10s --start-period=60s --retries=3 \
    CMD ["python", "/opt/fedpareto/healthcheck.py", "/var/lib/fedpareto/home"]
ENTRYPOINT ["fedpareto"]
CMD ["--help"]
