# many: A tiny stack
# Rendered by `builder render many` from lock 10e4405a94ee; do not edit.
# Comments name the template that each part comes from. There is no `# syntax=` line: that would need a registry.

# templates/stages/os.j2: debian bookworm, 2 OS packages; made by Dockerfile.base
FROM sglang-stack-base:debian-bookworm-BASE AS os
USER 0:0

# templates/stages/python.j2: Python 3.11 in a virtual environment of its own
FROM os AS python
RUN --mount=type=tmpfs,target=/mnt \
    --mount=type=bind,source=tools,target=/mnt/tools \
    set -eu; \
    touch /opt/.start; \
    python3.11 -m venv --without-pip /opt/venv; \
    python3 -P /mnt/tools/finish.py --epoch 1577836800 --start /opt/.start /opt

# templates/stages/torch.j2: torch and CUDA libraries, 1 wheel, 500 MB compressed
FROM python AS torch
RUN --mount=type=tmpfs,target=/mnt \
    --mount=type=bind,source=tools,target=/mnt/tools \
    --mount=type=bind,source=layers/torch,target=/mnt/layer \
    --mount=type=secret,id=ca,target=/mnt/secrets/ca \
    --mount=type=secret,id=proxies,target=/mnt/secrets/proxies \
    --mount=type=secret,id=netrc,target=/mnt/secrets/netrc \
    --mount=type=secret,id=index,target=/mnt/secrets/index \
    set -eu; layer=torch; \
    touch /opt/.start; \
    . /mnt/tools/site.sh; \
    install_from default /mnt/layer/default.txt; \
    rm -rf /opt/.tmp; \
    python3 -P /mnt/tools/finish.py --epoch 1577836800 --start /opt/.start --compile /opt/venv/lib/python3.11/site-packages/torch --compile /opt/venv/lib/python3.11/site-packages/torchgen /opt /usr/local

# templates/stages/kernels.j2: GPU kernels, 1 wheel
FROM torch AS kernels
RUN --mount=type=tmpfs,target=/mnt \
    --mount=type=bind,source=tools,target=/mnt/tools \
    --mount=type=bind,source=layers/kernels,target=/mnt/layer \
    set -eu; layer=kernels; \
    touch /opt/.start; \
    . /mnt/tools/site.sh; \
    install_from files /mnt/layer/files.txt; \
    rm -rf /opt/.tmp; \
    python3 -P /mnt/tools/finish.py --epoch 1577836800 --start /opt/.start /opt /usr/local

# templates/stages/flashinfer.j2: nothing of it is in this stack
FROM kernels AS flashinfer

# templates/stages/rest.j2: other wheels, 2 wheels, 2 kB compressed
FROM flashinfer AS rest
RUN --mount=type=tmpfs,target=/mnt \
    --mount=type=bind,source=tools,target=/mnt/tools \
    --mount=type=bind,source=layers/rest,target=/mnt/layer \
    --mount=type=secret,id=ca,target=/mnt/secrets/ca \
    --mount=type=secret,id=proxies,target=/mnt/secrets/proxies \
    --mount=type=secret,id=netrc,target=/mnt/secrets/netrc \
    --mount=type=secret,id=index,target=/mnt/secrets/index \
    --mount=type=secret,id=index-site,target=/mnt/secrets/index-site \
    set -eu; layer=rest; \
    touch /opt/.start; \
    . /mnt/tools/site.sh; \
    install_from default /mnt/layer/default.txt; \
    install_from site /mnt/layer/site.txt; \
    rm -rf /opt/.tmp; \
    python3 -P /mnt/tools/finish.py --epoch 1577836800 --start /opt/.start /opt /usr/local

# templates/stages/proof_native.j2: the smoke test of everything below sglang, kept when only sglang changes
FROM rest AS proof_native
ENV PATH=/opt/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    XDG_CACHE_HOME=/var/cache/sglang-stack \
    FLASHINFER_WORKSPACE_BASE=/var/cache/sglang-stack \
    TRITON_CACHE_DIR=/var/cache/sglang-stack/triton \
    TORCHINDUCTOR_CACHE_DIR=/var/cache/sglang-stack/inductor \
    TVM_FFI_CACHE_DIR=/var/cache/sglang-stack/tvm-ffi \
    SGLANG_DG_CACHE_DIR=/var/cache/sglang-stack/deep-gemm \
    SGLANG_CACHE_DIR=/var/cache/sglang-stack/sglang \
    CUDA_CACHE_PATH=/var/cache/sglang-stack/cuda \
    HF_HOME=/var/cache/sglang-stack/huggingface
ENV EMPTY_ISH=" "
ENV MODE="it's # a 'value'"
ENV PERCENT="100% {x}"
RUN --network=none --mount=type=bind,source=smoke,target=/mnt/smoke \
    --mount=type=bind,source=native.json,target=/mnt/native.json \
    --mount=type=tmpfs,target=/tmp \
    mkdir /proof && cd /proof && PYTHONPATH=/mnt/smoke PYTHONDONTWRITEBYTECODE=1 \
    python3 -m builder.smoke native --spec /mnt/native.json --out /proof/native.json

# templates/stages/sglang.j2: nothing of it is in this stack
FROM rest AS sglang

# templates/stages/proof_sglang.j2: the smoke test of sglang on top; the image exists only if both passed
FROM sglang AS proof_sglang
ENV PATH=/opt/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    XDG_CACHE_HOME=/var/cache/sglang-stack \
    FLASHINFER_WORKSPACE_BASE=/var/cache/sglang-stack \
    TRITON_CACHE_DIR=/var/cache/sglang-stack/triton \
    TORCHINDUCTOR_CACHE_DIR=/var/cache/sglang-stack/inductor \
    TVM_FFI_CACHE_DIR=/var/cache/sglang-stack/tvm-ffi \
    SGLANG_DG_CACHE_DIR=/var/cache/sglang-stack/deep-gemm \
    SGLANG_CACHE_DIR=/var/cache/sglang-stack/sglang \
    CUDA_CACHE_PATH=/var/cache/sglang-stack/cuda \
    HF_HOME=/var/cache/sglang-stack/huggingface
ENV EMPTY_ISH=" "
ENV MODE="it's # a 'value'"
ENV PERCENT="100% {x}"
RUN --network=none --mount=type=bind,source=smoke,target=/mnt/smoke \
    --mount=type=bind,source=proof,target=/mnt/proof \
    --mount=type=bind,from=proof_native,source=/proof,target=/mnt/native \
    --mount=type=tmpfs,target=/tmp \
    mkdir /proof && cd /proof && PYTHONPATH=/mnt/smoke PYTHONDONTWRITEBYTECODE=1 \
    python3 -m builder.smoke sglang --spec /mnt/proof/spec.json --native /mnt/native/native.json --out /proof/smoke.json

# templates/stages/image.j2: the image: the layers, the proof that they passed, and how it starts
FROM sglang AS image
RUN --mount=type=tmpfs,target=/mnt \
    --mount=type=bind,source=tools,target=/mnt/tools \
    --mount=type=bind,source=smoke,target=/mnt/smoke \
    --mount=type=bind,source=proof,target=/mnt/proof \
    --mount=type=bind,from=proof_sglang,source=/proof,target=/mnt/passed \
    set -eu; \
    touch /opt/.start; \
    mkdir /opt/sglang-stack; \
    cp -R /mnt/smoke/builder /mnt/proof/. /mnt/passed/smoke.json /opt/sglang-stack/; \
    python3 -P /mnt/tools/finish.py --epoch 1577836800 --start /opt/.start /opt
ENV NVIDIA_DRIVER_CAPABILITIES="compute,utility"
ENV NVIDIA_REQUIRE_CUDA="cuda>=13.0"
ENV PATH=/opt/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    XDG_CACHE_HOME=/var/cache/sglang-stack \
    FLASHINFER_WORKSPACE_BASE=/var/cache/sglang-stack \
    TRITON_CACHE_DIR=/var/cache/sglang-stack/triton \
    TORCHINDUCTOR_CACHE_DIR=/var/cache/sglang-stack/inductor \
    TVM_FFI_CACHE_DIR=/var/cache/sglang-stack/tvm-ffi \
    SGLANG_DG_CACHE_DIR=/var/cache/sglang-stack/deep-gemm \
    SGLANG_CACHE_DIR=/var/cache/sglang-stack/sglang \
    CUDA_CACHE_PATH=/var/cache/sglang-stack/cuda \
    HF_HOME=/var/cache/sglang-stack/huggingface
ENV EMPTY_ISH=" "
ENV MODE="it's # a 'value'"
ENV PERCENT="100% {x}"
LABEL com.example.team="inference, 'eu'"
LABEL org.opencontainers.image.description="A tiny stack"
LABEL org.opencontainers.image.title="sglang-stack many"
LABEL org.opencontainers.image.version="10e4405a94ee"
LABEL sglang-stack.cuda="13.0.2"
LABEL sglang-stack.driver="580"
LABEL sglang-stack.gpus="12.0"
LABEL sglang-stack.lock="10e4405a94ee72f30b7d4459e5590289526d5027d9e2d9da9230c9ff7a2b3a66"
LABEL sglang-stack.matrix="many"
LABEL sglang-stack.requires="cuda>=13.0"
LABEL sglang-stack.stack.sgl-kernel="0.3.21+cu130"
LABEL sglang-stack.stack.torch="2.11.0"
USER 10001:0
CMD ["python3", "-P", "/opt/sglang-stack/builder/smoke/about.py"]
