# Sourced by the steps that install wheels. What the site says comes in as build secrets (files in /mnt/secrets, never in
# a layer, the history or the cache) and stays in this shell.
if [ -s /mnt/secrets/ca ]; then export SSL_CERT_FILE=/mnt/secrets/ca; fi
if [ -s /mnt/secrets/proxies ]; then . /mnt/secrets/proxies; fi
if [ -s /mnt/secrets/netrc ]; then export NETRC=/mnt/secrets/netrc; fi
# On the file system of the environment: wheels are unpacked once and linked into place, and nothing is left in /tmp.
export TMPDIR=/opt/.tmp UV_NO_CONFIG=1 UV_LINK_MODE=hardlink UV_NO_PROGRESS=1
mkdir "$TMPDIR"
trap 'rm -rf "$TMPDIR"' EXIT

# install_from INDEX REQUIREMENTS: exactly these files, each by its sha256, from this index or from beside the list.
install_from() {
    set -- "$1" "$2" "/mnt/secrets/index-$1"
    if [ "$1" = default ]; then set -- "$1" "$2" /mnt/secrets/index; fi
    if [ "$1" = files ]; then
        (cd "$(dirname "$2")" && /mnt/tools/uv pip install --no-cache --python /opt/venv/bin/python --no-deps --require-hashes --no-index -r "$2")
    elif [ -s "$3" ]; then
        UV_DEFAULT_INDEX="$(cat "$3")" /mnt/tools/uv pip install --no-cache --python /opt/venv/bin/python --no-deps --require-hashes --only-binary :all: -r "$2"
    elif [ "$1" = default ]; then
        /mnt/tools/uv pip install --no-cache --python /opt/venv/bin/python --no-deps --require-hashes --only-binary :all: -r "$2"
    else
        echo "error: the address of index $1 was not given to the build" >&2
        exit 1
    fi
    rm -rf "$TMPDIR"/*
}
