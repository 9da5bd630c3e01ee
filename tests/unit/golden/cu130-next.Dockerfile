# cu130-next: SGLang 0.5.15.post1 on CUDA 13.0 for Blackwell (SM120) and Hopper, from the default package index alone
# Rendered by `builder render cu130-next` from lock cf68a606c1b4; do not edit.
# Comments name the template that each part comes from. There is no `# syntax=` line: that would need a registry.

# templates/stages/os.j2: debian bookworm, 173 OS packages; made by Dockerfile.base
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

# templates/stages/torch.j2: torch and CUDA libraries, 29 wheels, 2.83 GB compressed
FROM python AS torch
RUN --mount=type=tmpfs,target=/mnt \
    --mount=type=bind,source=tools,target=/mnt/tools \
    --mount=type=bind,source=layers/torch,target=/mnt/layer \
    --mount=type=bind,source=cuda,target=/mnt/cuda \
    --mount=type=secret,id=ca,target=/mnt/secrets/ca \
    --mount=type=secret,id=proxies,target=/mnt/secrets/proxies \
    --mount=type=secret,id=netrc,target=/mnt/secrets/netrc \
    --mount=type=secret,id=index,target=/mnt/secrets/index \
    set -eu; layer=torch; \
    touch /opt/.start; \
    . /mnt/tools/site.sh; \
    install_from default /mnt/layer/default.txt; \
    rm -rf /opt/.tmp; \
    python3 -P /mnt/cuda/cuda_home.py --site-packages /opt/venv/lib/python3.11/site-packages --home /usr/local/cuda; \
    python3 -P /mnt/tools/finish.py --epoch 1577836800 --start /opt/.start --compile /opt/venv/lib/python3.11/site-packages/torch --compile /opt/venv/lib/python3.11/site-packages/torchgen /opt /usr/local

# templates/stages/kernels.j2: GPU kernels, 16 wheels, 943 MB compressed
FROM torch AS kernels
RUN --mount=type=tmpfs,target=/mnt \
    --mount=type=bind,source=tools,target=/mnt/tools \
    --mount=type=bind,source=layers/kernels,target=/mnt/layer \
    --mount=type=secret,id=ca,target=/mnt/secrets/ca \
    --mount=type=secret,id=proxies,target=/mnt/secrets/proxies \
    --mount=type=secret,id=netrc,target=/mnt/secrets/netrc \
    --mount=type=secret,id=index,target=/mnt/secrets/index \
    set -eu; layer=kernels; \
    touch /opt/.start; \
    . /mnt/tools/site.sh; \
    install_from default /mnt/layer/default.txt; \
    install_from default /mnt/layer/default.over.txt; \
    rm -rf /opt/.tmp; \
    python3 -P /mnt/tools/finish.py --epoch 1577836800 --start /opt/.start /opt /usr/local

# templates/stages/flashinfer.j2: flashinfer, 2 wheels, 462 MB compressed
FROM kernels AS flashinfer
RUN --mount=type=tmpfs,target=/mnt \
    --mount=type=bind,source=tools,target=/mnt/tools \
    --mount=type=bind,source=layers/flashinfer,target=/mnt/layer \
    --mount=type=secret,id=ca,target=/mnt/secrets/ca \
    --mount=type=secret,id=proxies,target=/mnt/secrets/proxies \
    --mount=type=secret,id=netrc,target=/mnt/secrets/netrc \
    --mount=type=secret,id=index,target=/mnt/secrets/index \
    set -eu; layer=flashinfer; \
    touch /opt/.start; \
    . /mnt/tools/site.sh; \
    install_from default /mnt/layer/default.txt; \
    install_from files /mnt/layer/files.txt; \
    rm -rf /opt/.tmp; \
    python3 -P /mnt/tools/finish.py --epoch 1577836800 --start /opt/.start /opt /usr/local

# templates/stages/rest.j2: other wheels, 145 wheels, 333 MB compressed
FROM flashinfer AS rest
RUN --mount=type=tmpfs,target=/mnt \
    --mount=type=bind,source=tools,target=/mnt/tools \
    --mount=type=bind,source=layers/rest,target=/mnt/layer \
    --mount=type=secret,id=ca,target=/mnt/secrets/ca \
    --mount=type=secret,id=proxies,target=/mnt/secrets/proxies \
    --mount=type=secret,id=netrc,target=/mnt/secrets/netrc \
    --mount=type=secret,id=index,target=/mnt/secrets/index \
    set -eu; layer=rest; \
    touch /opt/.start; \
    . /mnt/tools/site.sh; \
    install_from default /mnt/layer/default.txt; \
    rm -rf /opt/.tmp; \
    python3 -P /mnt/tools/finish.py --epoch 1577836800 --start /opt/.start --compile /opt/venv/lib/python3.11/site-packages/transformers /opt /usr/local

# templates/stages/compiled.j2: flashinfer's fused all-reduce, compiled, for 12.0a, 9.0a; kept when only sglang changes
FROM rest AS compiled
RUN --network=none --mount=type=tmpfs,target=/mnt \
    --mount=type=bind,source=tools,target=/mnt/tools \
    --mount=type=bind,source=compile,target=/mnt/compile \
    set -eu; layer=compiled; \
    touch /opt/.start; \
    PATH=/opt/venv/bin:/usr/local/cuda/bin:"$PATH" CUDA_HOME=/usr/local/cuda PYTHONDONTWRITEBYTECODE=1 PYTHONHASHSEED=0 \
    python -P /mnt/compile/precompile.py --site-packages /opt/venv/lib/python3.11/site-packages --work /mnt/work --module gen_trtllm_comm_module 12.0a 9.0a; \
    python3 -P /mnt/tools/finish.py --epoch 1577836800 --start /opt/.start /opt /usr/local

# templates/stages/proof_native.j2: the smoke test of everything below sglang, kept when only sglang changes
FROM compiled AS proof_native
ENV PATH=/opt/venv/bin:/usr/local/cuda/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    CUDA_HOME=/usr/local/cuda \
    XDG_CACHE_HOME=/var/cache/sglang-stack \
    FLASHINFER_WORKSPACE_BASE=/var/cache/sglang-stack \
    TRITON_CACHE_DIR=/var/cache/sglang-stack/triton \
    TORCHINDUCTOR_CACHE_DIR=/var/cache/sglang-stack/inductor \
    TVM_FFI_CACHE_DIR=/var/cache/sglang-stack/tvm-ffi \
    SGLANG_DG_CACHE_DIR=/var/cache/sglang-stack/deep-gemm \
    SGLANG_CACHE_DIR=/var/cache/sglang-stack/sglang \
    CUDA_CACHE_PATH=/var/cache/sglang-stack/cuda \
    HF_HOME=/var/cache/sglang-stack/huggingface
RUN --network=none --mount=type=bind,source=smoke,target=/mnt/smoke \
    --mount=type=bind,source=native.json,target=/mnt/native.json \
    --mount=type=tmpfs,target=/tmp \
    mkdir /proof && cd /proof && PYTHONPATH=/mnt/smoke PYTHONDONTWRITEBYTECODE=1 \
    python3 -m builder.smoke native --spec /mnt/native.json --out /proof/native.json

# templates/stages/sglang.j2: sglang, 1 wheel, 12.8 MB compressed
FROM compiled AS sglang
RUN --mount=type=tmpfs,target=/mnt \
    --mount=type=bind,source=tools,target=/mnt/tools \
    --mount=type=bind,source=layers/sglang,target=/mnt/layer \
    set -eu; layer=sglang; \
    touch /opt/.start; \
    . /mnt/tools/site.sh; \
    install_from files /mnt/layer/files.txt; \
    rm -rf /opt/.tmp; \
    python3 -P /mnt/tools/finish.py --epoch 1577836800 --start /opt/.start --compile /opt/venv/lib/python3.11/site-packages/sglang /opt /usr/local

# templates/stages/proof_sglang.j2: the smoke test of sglang on top; the image exists only if both passed
FROM sglang AS proof_sglang
ENV PATH=/opt/venv/bin:/usr/local/cuda/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    CUDA_HOME=/usr/local/cuda \
    XDG_CACHE_HOME=/var/cache/sglang-stack \
    FLASHINFER_WORKSPACE_BASE=/var/cache/sglang-stack \
    TRITON_CACHE_DIR=/var/cache/sglang-stack/triton \
    TORCHINDUCTOR_CACHE_DIR=/var/cache/sglang-stack/inductor \
    TVM_FFI_CACHE_DIR=/var/cache/sglang-stack/tvm-ffi \
    SGLANG_DG_CACHE_DIR=/var/cache/sglang-stack/deep-gemm \
    SGLANG_CACHE_DIR=/var/cache/sglang-stack/sglang \
    CUDA_CACHE_PATH=/var/cache/sglang-stack/cuda \
    HF_HOME=/var/cache/sglang-stack/huggingface
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
ENV PATH=/opt/venv/bin:/usr/local/cuda/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    CUDA_HOME=/usr/local/cuda \
    XDG_CACHE_HOME=/var/cache/sglang-stack \
    FLASHINFER_WORKSPACE_BASE=/var/cache/sglang-stack \
    TRITON_CACHE_DIR=/var/cache/sglang-stack/triton \
    TORCHINDUCTOR_CACHE_DIR=/var/cache/sglang-stack/inductor \
    TVM_FFI_CACHE_DIR=/var/cache/sglang-stack/tvm-ffi \
    SGLANG_DG_CACHE_DIR=/var/cache/sglang-stack/deep-gemm \
    SGLANG_CACHE_DIR=/var/cache/sglang-stack/sglang \
    CUDA_CACHE_PATH=/var/cache/sglang-stack/cuda \
    HF_HOME=/var/cache/sglang-stack/huggingface
LABEL org.opencontainers.image.description="SGLang 0.5.15.post1 on CUDA 13.0 for Blackwell (SM120) and Hopper, from the default package index alone"
LABEL org.opencontainers.image.title="sglang-stack cu130-next"
LABEL org.opencontainers.image.version="cf68a606c1b4"
LABEL sglang-stack.cuda="13.0.2"
LABEL sglang-stack.driver="580"
LABEL sglang-stack.gpus="12.0,9.0"
LABEL sglang-stack.lock="cf68a606c1b473bb6b8544bf062da757310d5d232b38cd38513a9632c4e83420"
LABEL sglang-stack.matrix="cu130-next"
LABEL sglang-stack.patches="sm120,eagle3"
LABEL sglang-stack.requires="cuda>=13.0"
LABEL sglang-stack.stack.flashinfer-cubin="0.6.12"
LABEL sglang-stack.stack.flashinfer-python="0.6.12"
LABEL sglang-stack.stack.sglang="0.5.15.post1"
LABEL sglang-stack.stack.sglang-kernel="0.4.4"
LABEL sglang-stack.stack.torch="2.11.0"
USER 10001:0
CMD ["python3", "-P", "/opt/sglang-stack/builder/smoke/about.py"]
