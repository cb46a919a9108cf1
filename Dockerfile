# The native kernels and the server, without MindSpore, for a machine that computes on its processor:
#
#   docker build -t lite-runner .
#   docker run -p 8000:8000 -v lite-runner:/cache -e KEY=... lite-runner run_mode=serve \
#     model=smollm2_135m serve.host=0.0.0.0 serve.port=8000 serve.api_key=env:KEY
#
# Packages are those of requirements/lock.txt, by their hashes. Python is the system's; pip stays,
# since models are fetched from its index.
ARG BASE=debian:12-slim

FROM ${BASE} AS build
RUN apt-get update && apt-get install --yes --no-install-recommends g++ python3 python3-venv
WORKDIR /source
COPY requirements requirements
RUN python3 -m venv /opt/lite-runner \
 && sed '/^# core$/q' requirements/lock.txt >build.txt \
 && sed '/^# extras$/q' requirements/lock.txt >core.txt \
 && for locked in build.txt core.txt; do \
      /opt/lite-runner/bin/python -m pip install --no-cache-dir --require-hashes \
        --no-build-isolation --use-pep517 --requirement $locked || exit 1; \
    done
COPY LICENSE MANIFEST.in README.md pyproject.toml run_lite.py setup.cfg setup.py ./
COPY conf conf
COPY lite_runner lite_runner
RUN /opt/lite-runner/bin/python -m pip install --no-deps --no-build-isolation . \
 && /opt/lite-runner/bin/python -m pip uninstall --yes setuptools
COPY scripts/sbom.py scripts/sbom.py

FROM ${BASE}
RUN apt-get update \
 && apt-get install --yes --no-install-recommends ca-certificates libstdc++6 python3 \
 && rm -rf /var/lib/apt/lists/* \
 && install --directory --owner 10001 --group 10001 /cache /work
COPY --from=build /opt/lite-runner /opt/lite-runner
# CycloneDX: Python's packages and Debian's.
COPY --from=build /source/scripts/sbom.py /opt/lite-runner/
RUN /opt/lite-runner/bin/python /opt/lite-runner/sbom.py --system >/opt/lite-runner/sbom.cdx.json
# Nothing else is written, so that the root file system may be read-only.
ENV PATH=/opt/lite-runner/bin:$PATH LITE_RUNNER_CACHE=/cache HOME=/work PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
WORKDIR /work
VOLUME ["/cache", "/work"]
EXPOSE 8000
HEALTHCHECK --start-period=5m CMD ["python3", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health', timeout=5)"]
ENTRYPOINT ["run-lite"]
CMD ["--help"]
