# What `builder doctor` asks a host, in one go: POSIX sh, no other tool has to be there. Nothing is changed, nothing but a
# temporary folder is written. What may hang (nvidia-smi on a sick driver does, beyond any signal) runs beside the rest and is
# left behind when the time is over. Each part begins with `@@ NAME STATUS`, its lines with `|`; builder/doctor/readings.py
# reads them. Names, addresses, serial numbers and UUIDs are not asked for.
LC_ALL=C
PATH="$PATH:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/usr/local/nvidia/bin:/usr/lib/wsl/lib"
export LC_ALL PATH
limit=${BUILDER_DOCTOR_LIMIT:-20}
# Where another root is given, /proc, /sys, /etc, /dev are looked for there: for tests.
root=${BUILDER_DOCTOR_ROOT:-}
umask 077
started=

dir=
for parent in "${TMPDIR:-/tmp}" /tmp /var/tmp /dev/shm /run; do
    dir="$parent/builder-doctor.$$"
    mkdir "$dir" 2>/dev/null && break
    dir=
done
leave() { [ -n "$dir" ] && rm -rf "$dir"; }
trap leave EXIT

lines() {
    count=0
    while IFS= read -r line || [ -n "$line" ]; do
        printf '|%s\n' "$line"
        count=$((count + 1))
        [ "$count" -ge 4000 ] && break
    done
}

# part NAME COMMAND…: what cannot hang.
part() {
    printf '@@ %s 0\n' "$1"
    shift
    "$@" </dev/null 2>/dev/null | lines
}

# start NAME COMMAND…: what may hang. Its answer is printed by `finish`.
start() {
    name=$1
    shift
    if ! command -v "$1" >/dev/null 2>&1; then
        printf '@@ %s missing\n' "$name"
    elif [ -n "$dir" ]; then
        (
            sh -c 'echo $$ >"$0.pid"; exec "$@"' "$dir/$name" "$@" </dev/null >"$dir/$name.out" 2>&1
            echo $? >"$dir/$name.rc"
        ) </dev/null >/dev/null 2>&1 &
        started="$started $name"
    elif command -v timeout >/dev/null 2>&1; then
        answer=$(timeout "$limit" "$@" </dev/null 2>&1)
        printf '@@ %s %s\n' "$name" "$?"
        printf '%s\n' "$answer" | lines
    else
        printf '@@ %s unbounded\n' "$name"
    fi
}

if sleep 0.1 2>/dev/null; then nap=0.1 naps=$((limit * 10)); else nap=1 naps=$limit; fi

finish() {
    for name in $started; do
        while [ ! -s "$dir/$name.rc" ] && [ "$naps" -gt 0 ]; do
            sleep "$nap"
            naps=$((naps - 1))
        done
        status=timeout
        if [ -s "$dir/$name.rc" ]; then
            read -r status <"$dir/$name.rc"
        elif [ -s "$dir/$name.pid" ]; then
            read -r pid <"$dir/$name.pid"
            kill -9 "$pid" 2>/dev/null
        fi
        printf '@@ %s %s\n' "$name" "$status"
        [ -f "$dir/$name.out" ] && lines <"$dir/$name.out"
    done
    started=
    # The next round has time of its own, but little.
    [ "$naps" -lt 30 ] && naps=30
}

first_word() {
    while read -r word _; do
        case $word in nvidia* | nouveau) printf '%s\n' "$word" ;; esac
    done <"$root/proc/modules"
}

nodes() {
    for node in "$root"/dev/nvidia* "$root"/dev/dxg "$root"/dev/nvidia-caps/*; do
        [ -c "$node" ] || [ -n "$root" ] && [ -e "$node" ] && printf '%s\n' "${node#"$root"}"
    done
}

# NVIDIA's GPUs on the bus: address, kernel driver, what the IOMMU does for its group, the bridges above it.
pci() {
    [ -d "$root/sys/bus/pci/devices" ] && printf 'bus\n'
    for device in "$root"/sys/bus/pci/devices/*; do
        vendor= class=
        [ -r "$device/vendor" ] && read -r vendor <"$device/vendor"
        [ -r "$device/class" ] && read -r class <"$device/class"
        case "$vendor $class" in
            "0x10de 0x0300"* | "0x10de 0x0302"*) kind=gpu ;;
            "0x10de 0x0680"*) kind=switch ;;
            *) continue ;;
        esac
        driver=- group=-
        [ -e "$device/driver" ] && driver=$(cd -P "$device/driver" && pwd) && driver=${driver##*/}
        if [ -e "$device/iommu_group" ]; then
            group=unknown
            [ -r "$device/iommu_group/type" ] && read -r group <"$device/iommu_group/type"
        fi
        chain=$(cd -P "$device" && pwd)
        printf '%s %s driver=%s group=%s chain=%s\n' "$kind" "${device##*/}" "$driver" "$group" "${chain#"$root"/sys/devices/}"
    done
}

kernel_words() {
    read -r words <"$root/proc/cmdline"
    for word in $words; do
        case $word in *iommu* | pci=* | pcie_acs_override*) printf '%s\n' "$word" ;; esac
    done
}

container() {
    for mark in /.dockerenv /run/.containerenv; do
        [ -e "$root$mark" ] && printf 'file %s\n' "$mark"
    done
    [ -n "${container:-}" ] && printf 'variable\n'
    [ -r "$root/proc/1/cgroup" ] && while read -r line; do
        case $line in *docker* | *kubepods* | *containerd* | *libpod* | *lxc*) printf 'cgroup\n' ;; esac
    done <"$root/proc/1/cgroup"
    [ -e "$root/dev/dxg" ] && printf 'dxg\n'
}

selinux() {
    if [ -r "$root/sys/fs/selinux/enforce" ]; then
        read -r enforce <"$root/sys/fs/selinux/enforce"
        printf '%s\n' "$enforce"
    else
        printf 'off\n'
    fi
}

# CDI files: what they name, and which of it is not there.
cdi() {
    for folder in /etc/cdi /var/run/cdi; do
        for file in "$root$folder"/*.yaml "$root$folder"/*.json; do
            [ -r "$file" ] || continue
            printf 'file %s\n' "${file#"$root"}"
            while IFS= read -r line || [ -n "$line" ]; do
                case $line in *kind* | *name* | *libcuda.so.* | *libnvidia-ml.so.*) printf 'line %s\n' "$line" ;; esac
                case $line in
                    *containerPath*) continue ;;
                    *hostPath* | *path:\ /dev/* | *\"path\":\ \"/dev/*) ;;
                    *) continue ;;
                esac
                named=${line#*: }
                named=${named#\"}
                named=${named%,}
                named=${named%\"}
                case $named in /*) [ -e "$root$named" ] || printf 'missing %s\n' "$named" ;; esac
            done <"$file"
        done
    done
}

compat() {
    for library in "$root"/usr/local/cuda*/compat/libcuda.so.*.* "$root"/usr/local/cuda*/compat/*/libcuda.so.*.*; do
        [ -e "$library" ] && printf 'library %s\n' "${library#"$root"}"
    done
    case "${LD_LIBRARY_PATH:-}" in */compat*) printf 'path LD_LIBRARY_PATH\n' ;; esac
    for file in "$root"/etc/ld.so.conf "$root"/etc/ld.so.conf.d/*.conf; do
        [ -r "$file" ] || continue
        while read -r line; do
            case $line in \#*) ;; */cuda*compat*) printf 'path %s\n' "${file#"$root"}" ;; esac
        done <"$file"
    done
}

fabric_process() {
    for process in "$root"/proc/[0-9]*/comm; do
        [ -r "$process" ] && read -r command 2>/dev/null <"$process" && case $command in nv-fabricman*) printf 'running\n' ;; esac
    done
}

about() {
    printf 'script 1\n'
    printf 'uid %s\n' "$(id -u)"
    printf 'kernel %s\n' "$(uname -r)"
    printf 'machine %s\n' "$(uname -m)"
    command -v nvidia-container-runtime-hook >/dev/null && printf 'hook\n'
    command -v nvidia-container-runtime >/dev/null && printf 'runtime\n'
    [ -S "$root/var/run/docker.sock" ] && printf 'socket docker\n'
    [ -r "$root/proc/modules" ] && printf 'modules\n'
    true
}

file() { [ -r "$root$1" ] && cat "$root$1"; }

program='
import ctypes
cuda = ctypes.CDLL("libcuda.so.1")
number = ctypes.c_int()
status = cuda.cuInit(0)
cuda.cuDriverGetVersion(ctypes.byref(number))
print("cuinit", status, number.value)
for line in open("/proc/self/maps"):
    if "libcuda.so" in line:
        print("library", line.split()[-1])
        break
if status == 0 and cuda.cuDeviceGetCount(ctypes.byref(number)) == 0:
    count = number.value
    print("devices", count)
    for one in range(count):
        for other in range(count):
            if one != other and cuda.cuDeviceCanAccessPeer(ctypes.byref(number), one, other) == 0:
                print("peer", one, other, number.value)
'

ours='docker image ls --quiet --no-trunc --filter label=sglang-stack=image | sort -u | while read -r image; do
    docker image inspect --format "{{.Id}} {{index .Config.Labels \"sglang-stack.lock\"}} {{json .RootFS.Layers}}" "$image"
done'

part about about
part os_release file /etc/os-release
part container container
part nvrm file /proc/driver/nvidia/version
part modules first_word
part nodes nodes
part pci pci
part cmdline kernel_words
part meminfo file /proc/meminfo
part limits file /proc/self/limits
part selinux selinux
part daemon file /etc/docker/daemon.json
part runtime_config file /etc/nvidia-container-runtime/config.toml
part cdi cdi
part compat compat
part fabric_process fabric_process
columns=index,name,memory.total,pci.bus_id,driver_version
start smi nvidia-smi
start smi_names nvidia-smi --query-gpu=$columns --format=csv
start smi_gpus nvidia-smi --query-gpu=$columns,compute_cap,memory.used,mig.mode.current,persistence_mode --format=csv
start smi_topo nvidia-smi topo -m
start smi_p2p nvidia-smi topo -p2p r
start smi_fabric nvidia-smi --query-gpu=index,fabric.state,fabric.status --format=csv
start toolkit nvidia-ctk --version
start toolkit_cli nvidia-container-cli --version
start docker docker info --format '{{json .}}'
start docker_version docker version --format '{{json .Server}}'
if command -v docker >/dev/null 2>&1; then
    start images sh -c "$ours"
elif [ -S /var/run/docker.sock ]; then
    start docker_socket curl --silent --max-time "$limit" --unix-socket /var/run/docker.sock http://localhost/info
fi
start podman podman info --format json
start libcuda sh -c 'ldconfig -p | grep "libcuda\.so\.1"'
start acs sh -c 'lspci -vvv | grep -E "^[0-9a-f]|ACSCtl|access denied"'
start fabric_service systemctl is-active nvidia-fabricmanager
start cuinit python3 -I -c "$program"
finish

data=
for answer in docker docker_socket podman; do
    [ -n "$dir" ] && [ -f "$dir/$answer.out" ] && while IFS= read -r line; do
        case $line in
            *'"DockerRootDir":"'*) data=${line#*'"DockerRootDir":"'} ;;
            *'"graphRoot": "'*) [ -z "$data" ] && data=${line#*'"graphRoot": "'} ;;
            *) continue ;;
        esac
        data=${data%%\"*}
    done <"$dir/$answer.out"
done
[ -n "$data" ] || data=/var/lib/docker
while [ ! -d "$data" ] && [ "$data" != / ]; do data=${data%/*} data=${data:-/}; done
start df_data df -Pk "$data"
[ -d /var/lib/containerd ] && start df_containerd df -Pk /var/lib/containerd
start df_tmp df -Pk "${TMPDIR:-/tmp}"
[ -d /dev/shm ] && start df_shm df -Pk /dev/shm
finish
printf '@@ end 0\n'
