#!/usr/bin/env bash
# Install mpbroker as a systemd service from this checkout, or take it away again.
#
#   deploy/install.sh [--start] [--pipelines] [--dry-run] [--root DIR] [--python PYTHON]
#   deploy/install.sh --uninstall [--dry-run] [--root DIR]
#
#   --start        enable the service and start it, when all is in place
#   --pipelines    also the unit mpbroker-pipeline@NAME, which runs the pipeline that
#                  /etc/mpbroker/pipelines/NAME.toml describes, and Spark (600 MB); needs
#                  Java 17 or newer. Later runs keep it up to date without being asked
#   --dry-run      say what would be done, and do nothing
#   --root DIR     below DIR instead of /: to build an image, or to look at the result
#   --python PATH  which Python; 3.11 or newer
#   --uninstall    remove all but what you would miss: settings, data and the user
#
# Programs go to /opt/mpbroker-ID, an ID for each state of the sources, and
# /opt/mpbroker points to the newest: a running broker keeps the files that it was
# started with, and an installation that is interrupted changes nothing. Doing it twice
# is doing it once; settings that are there are left as they are.
set -euo pipefail
source=$(cd "${BASH_SOURCE[0]%/*}/.." && pwd -P)
root=
python=
dry_run=
start=
pipelines=
action=install

say() { printf 'install: %s\n' "$*"; }
die() {
    printf 'install: %s\n' "$*" >&2
    exit 1
}
usage() { # MESSAGE
    printf 'install: %s (see: %s --help)\n' "$1" "$0" >&2
    exit 2
}
run() { # COMMAND...; or only say so
    if [[ $dry_run ]]; then
        say "would run: $*"
    else
        "$@"
    fi
}

while (($#)); do
    case $1 in
    --dry-run) dry_run=yes ;;
    --start) start=yes ;;
    --pipelines) pipelines=yes ;;
    --uninstall) action=uninstall ;;
    --root | --python)
        (($# > 1)) || usage "$1 needs a value"
        [[ $1 == --root ]] && root=${2%/} || python=$2
        shift
        ;;
    -h | --help)
        sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
        exit
        ;;
    *) usage "no such option: $1" ;;
    esac
    shift
done

if [[ $root ]]; then
    [[ -d $root ]] || die "--root $root: no such directory; make it first"
    root=$(cd "$root" && pwd -P)
    [[ ! $start ]] || die "--start: nothing can be started below --root"
fi
[[ $dry_run || $EUID == 0 ]] ||
    die "needs root, for the user, /opt and /etc: sudo $0; or look first: $0 --dry-run"

units=(mpbroker.service mpbroker@.service mpbroker.socket)
pipeline_unit=mpbroker-pipeline@.service
prefix=/opt/mpbroker
settings=/etc/mpbroker/server.properties

# Whether a service manager runs here that should hear of it.
has_systemd() { [[ ! $root && -d /run/systemd/system ]]; }

install_file() { # FROM TO; TO is below the root
    if cmp -s "$1" "$root$2"; then
        say "$2 is as it should be"
    else
        say "$2"
        run install -D -m 0644 "$1" "$root$2"
    fi
}

# The first Python that will do; it sets `found`, or `unreadable` if there is only one that
# the service's user cannot run. A Python that is named is the only one that is looked at.
find_python() {
    local name path
    local names=(python3 python3.14 python3.13 python3.12 python3.11 /usr/bin/python3)
    [[ ! $python ]] || names=("$python")
    found=''
    unreadable=''
    for name in "${names[@]}"; do
        # A shim (pyenv) is asked for the file behind it.
        path=$("$name" -c 'import os, sys, venv, ensurepip
if sys.version_info >= (3, 11): print(os.path.realpath(sys.executable))' 2>/dev/null) || continue
        [[ $path ]] || continue
        if [[ $root ]] || others_can_run "$path"; then
            found=$(command -v "$name")
            return
        fi
        unreadable=$path
    done
    return 1
}

# The units hide home directories (ProtectHome=), and the service's user is none of ours.
others_can_run() { # FILE
    local path=$1
    [[ $path != /root/* && $path != /home/* ]] || return 1
    while [[ $path != / ]]; do
        [[ $(stat -c %A "$path") == *[xt] ]] || return 1
        path=${path%/*}
        path=${path:-/}
    done
}

# The same sources, for the same Python, have the same ID.
id_of_sources() { # PYTHON
    (
        cd "$source"
        "$1" -VV
        find pyproject.toml setup.py mpbroker -type f \
            \( -name '*.py' -o -name '*.c' -o -name '*.h' -o -name '*.toml' \) \
            -print0 | LC_ALL=C sort -z | xargs -0 sha256sum
    ) | sha256sum | cut -c 1-12
}

install_programs() { # PYTHON PREFIX EXTRAS
    local id target prefix=$2
    id=$(id_of_sources "$1")
    target=$prefix-$id
    if [[ -e $root$target/.complete ]]; then
        say "$target is as it should be"
    else
        say "$target, with $("$1" -V)"
        [[ $dry_run ]] || build_programs "$1" "$target" "$3"
    fi
    if [[ $(readlink "$root$prefix" || true) == "${target##*/}" ]]; then
        return
    fi
    [[ ! -e $root$prefix || -L $root$prefix ]] ||
        die "$prefix is there and not ours: move it away"
    say "$prefix points to ${target##*/}"
    # By rename, so that there is no moment without it.
    run ln -sfn "${target##*/}" "$root$prefix.new"
    run mv -T "$root$prefix.new" "$root$prefix"
}

build_programs() { # PYTHON TARGET EXTRAS
    local work=$root$2
    rm -rf "$work"
    scratch=$(mktemp -d)
    trap 'rm -rf "$scratch"' EXIT
    # A copy, because building leaves files beside the sources, and here they would be
    # root's.
    (cd "$source" && tar -c --exclude=__pycache__ --exclude='*.so' \
        pyproject.toml setup.py README.md LICENSE mpbroker) | tar -x -C "$scratch"
    mkdir -p "${work%/*}"
    "$1" -m venv "$work"
    say "installing mpbroker and its dependencies; with slow networks this takes minutes"
    env -u PYTHONPATH -u PYTHONHOME PIP_USER=0 PIP_DISABLE_PIP_VERSION_CHECK=1 \
        PIP_NO_INPUT=1 PIP_ROOT_USER_ACTION=ignore PIP_PROGRESS_BAR=off \
        "$work/bin/python" -m pip install --no-warn-script-location "$scratch$3" |
        { grep --line-buffered -E '^(Collecting|Building|Installing)' || true; } |
        sed -u 's/^/install:   /' ||
        die "pip could not install mpbroker; its message is above"
    # Below another root the scripts name the place where they will be.
    [[ ! $root ]] || grep -rlIZF "$work" "$work/bin" | xargs -0r sed -i "s#$work#$2#g"
    touch "$work/.complete"
}

remove_old_programs() { # PREFIX
    local current old prefix=$1
    current=$(readlink "$root$prefix" || true)
    for old in "$root$prefix"-[0-9a-f]*; do
        [[ -e $old/.complete && ${old##*/} != "$current" ]] || continue
        # A broker that was started with it may import from it yet: here or, below another
        # root, in the container that has it; its maps name files as it sees them.
        if grep -qsF "${old##*/}/" /proc/[0-9]*/maps; then
            say "${old#"$root"} is in use, and stays"
        else
            say "${old#"$root"} is old, and goes"
            run rm -rf "$old"
        fi
    done
}

# Sizes to start from; `mpbroker ctl top` names the bottleneck, and `mpbroker ctl resize`
# changes them live. 16 processors and 59 handlers are what can run.
write_settings() { # CORES
    local processors=$(($1 / 2)) handlers=$1
    ((processors >= 1)) || processors=1
    ((processors <= 8)) || processors=8
    ((handlers >= 2)) || handlers=2
    ((handlers <= 32)) || handlers=32
    cat <<TEXT
# Settings of the broker on this host; \`mpbroker config list\` shows all there are, and
# \`mpbroker config explain KEY\` what one means.

# Clients on this machine only. For others: PLAINTEXT://0.0.0.0:9092 and, if they know
# this host by a name that is not its address, advertised.listeners.
listeners=PLAINTEXT://127.0.0.1:9092

# Metrics, a status page and health checks on this machine (deploy/prometheus.yml).
#metrics.listeners=HTTP://127.0.0.1:9404

# For $1 cores: half of them read and write sockets, as many execute requests as there
# are cores.
num.network.threads=$processors
num.io.threads=$handlers
TEXT
}

install_settings() {
    if [[ -e $root$settings ]]; then
        say "$settings is there, and stays"
        return
    fi
    local cores
    cores=$(nproc)
    say "$settings, for $cores cores"
    [[ ! $dry_run ]] || return 0
    mkdir -p "$root${settings%/*}"
    write_settings "$cores" >"$root$settings.new"
    mv "$root$settings.new" "$root$settings"
}

install_pipelines() { # PYTHON
    install_programs "$1" "$prefix-pipeline" "[spark]"
    install_file "$source/systemd/$pipeline_unit" "/etc/systemd/system/$pipeline_unit"
    run mkdir -p "$root/etc/mpbroker/pipelines"
    [[ $root ]] || command -v java >/dev/null ||
        say "pipelines need Java 17 or newer; on Debian: apt-get install openjdk-17-jre-headless" >&2
}

install_all() {
    local found unreadable unit below=()
    if ! find_python; then
        [[ ! $unreadable ]] ||
            die "$unreadable: the service's user cannot run it (it lies in a home directory," \
                "or others may not enter one above it); on Debian: apt-get install" \
                "python3-venv; or name one with --python"
        die "${python:-python3}: needs Python 3.11 or newer with venv; on Debian:" \
            "apt-get install python3-venv; or name one with --python"
    fi
    command -v systemd-sysusers >/dev/null ||
        die "needs systemd-sysusers and systemd-tmpfiles (Debian: apt-get install systemd)"
    install_programs "$found" "$prefix" ""
    for unit in "${units[@]}"; do
        install_file "$source/systemd/$unit" "/etc/systemd/system/$unit"
    done
    [[ ! -e $root/etc/systemd/system/$pipeline_unit ]] || pipelines=yes
    [[ ! $pipelines ]] || install_pipelines "$found"
    install_file "$source/systemd/mpbroker.sysusers" /etc/sysusers.d/mpbroker.conf
    install_file "$source/systemd/mpbroker.tmpfiles" /etc/tmpfiles.d/mpbroker.conf
    install_settings
    [[ ! $root ]] || below=(--root "$root")
    run systemd-sysusers "${below[@]}" "$root/etc/sysusers.d/mpbroker.conf"
    run systemd-tmpfiles --create "${below[@]}" "$root/etc/tmpfiles.d/mpbroker.conf"
    remove_old_programs "$prefix"
    remove_old_programs "$prefix-pipeline"
    if has_systemd; then
        run systemctl daemon-reload
        [[ ! $start ]] || run systemctl enable --now mpbroker.service
    elif [[ $start ]]; then
        die "all is in place, but no systemd runs here that could start it"
    fi
    [[ $start || $root || $dry_run ]] ||
        say "now: systemctl enable --now mpbroker; or, if it runs: systemctl restart mpbroker;" \
            "or, with all clients connected: $prefix/bin/mpbroker ctl upgrade"
}

uninstall_all() {
    local unit file
    if has_systemd; then
        run systemctl disable --now "${units[0]}" "${units[2]}" || true
        run systemctl stop 'mpbroker@*.service' 'mpbroker-pipeline@*.service' || true
    fi
    for unit in "${units[@]}" "$pipeline_unit"; do
        file=$root/etc/systemd/system/$unit
        [[ ! -e $file ]] || run rm -f "$file"
    done
    run rm -f "$root/etc/sysusers.d/mpbroker.conf" "$root/etc/tmpfiles.d/mpbroker.conf"
    for file in "$root$prefix" "$root$prefix-pipeline"; do
        [[ ! -L $file ]] || run rm -f "$file"
    done
    for file in "$root$prefix"-[0-9a-f]* "$root$prefix-pipeline"-[0-9a-f]*; do
        [[ ! -e $file/pyvenv.cfg ]] || run rm -rf "$file"
    done
    ! has_systemd || run systemctl daemon-reload
    say "left as they are: /etc/mpbroker, /var/lib/mpbroker and the user mpbroker"
}

"${action}_all"
