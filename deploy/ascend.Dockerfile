# The image for a machine with Ascend cards: MindSpore on the CANN of the base image.
#
#   docker build -t lite-runner-ascend -f deploy/ascend.Dockerfile --build-arg BASE=... .
#   docker run --device /dev/davinci0 --device /dev/davinci_manager --device /dev/devmm_svm \
#     --device /dev/hisi_hdc -v /usr/local/Ascend/driver:/usr/local/Ascend/driver:ro \
#     -v /usr/local/dcmi:/usr/local/dcmi:ro -v lite-runner:/cache -p 8000:8000 -e KEY=... \
#     lite-runner-ascend run_mode=serve model=smollm2_135m serve.host=0.0.0.0 serve.port=8000 \
#     serve.api_key=env:KEY
#
# BASE is an image of Debian's or Ubuntu's kind with CANN in ASCEND, of the version that MindSpore's
# release notes name, and Python 3.10 to 3.12. There is no default: it goes with the driver.
ARG BASE
FROM ${BASE}
ARG ASCEND=/usr/local/Ascend/ascend-toolkit
USER root
RUN apt-get update \
 && apt-get install --yes --no-install-recommends ca-certificates g++ python3-venv \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY requirements requirements
# CANN's compiler of operators is in the Python of the base image.
RUN python3 -m venv --system-site-packages /opt/lite-runner \
 && sed '/^# core$/q' requirements/lock.txt >build.txt \
 && sed '/^# tests$/q' requirements/lock.txt >jobs.txt \
 && for locked in build.txt jobs.txt; do \
      /opt/lite-runner/bin/python -m pip install --no-cache-dir --require-hashes \
        --no-build-isolation --use-pep517 --requirement $locked || exit 1; \
    done
COPY LICENSE MANIFEST.in README.md pyproject.toml run_lite.py setup.cfg setup.py ./
COPY conf conf
COPY lite_runner lite_runner
RUN /opt/lite-runner/bin/python -m pip install --no-deps --no-build-isolation . \
 && install --directory --owner 10001 --group 10001 /cache /work \
 && ln -s ${ASCEND} /opt/ascend
ENV PATH=/opt/lite-runner/bin:$PATH LITE_RUNNER_CACHE=/cache HOME=/work PYTHONDONTWRITEBYTECODE=1
# The group of the devices is 1000 (HwHiAiUser) where the driver was installed as its guide says.
USER 10001:1000
WORKDIR /work
VOLUME ["/cache", "/work"]
EXPOSE 8000
HEALTHCHECK --start-period=15m CMD ["python3", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health', timeout=5)"]
ENTRYPOINT ["bash", "-c", "source /opt/ascend/set_env.sh && exec run-lite \"$@\"", "run-lite"]
CMD ["--help"]
