#!/usr/bin/env bash
# Install mpbroker as a systemd service from this checkout, or take it away again.
#
#   deploy/install.sh [--start] [--dry-run] [--root DIR] [--python PYTHON]
#   deploy/install.sh --uninstall [--dry-run] [--root DIR]
#
#   --start        enable the service and start it, when all is in place
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
action=install

say() { printf 'install: %s\n' "$*"; }
die() {
    printf 'install: %s\n' "$*" >&2
    exit 1
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
    --uninstall) action=uninstall ;;
    --root | --python)
        (($# > 1)) || die "$1 needs a value"
        [[ $1 == --root ]] && root=${2%/} || python=$2
        shift
        ;;
    -h | --help)
        sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
        exit
        ;;
    *) die "no such option: $1 (see: $0 --help)" ;;
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

find_python() {
    local name
    for name in ${python:+"$python"} python3 python3.13 python3.12 python3.11; do
        if "$name" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' \
            2>/dev/null; then
            command -v "$name"
            return
        fi
        [[ $name != "$python" ]] || break # whoever names one means that one
    done
    return 1
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

install_programs() { # PYTHON
    local id target
    id=$(id_of_sources "$1")
    target=$prefix-$id
    if [[ -e $root$target/.complete ]]; then
        say "$target is as it should be"
    else
        say "$target, with $("$1" -V)"
        [[ $dry_run ]] || build_programs "$1" "$target"
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

build_programs() { # PYTHON TARGET
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
    env -u PYTHONPATH -u PYTHONHOME PIP_USER=0 PIP_DISABLE_PIP_VERSION_CHECK=1 \
        PIP_NO_INPUT=1 PIP_ROOT_USER_ACTION=ignore \
        "$work/bin/python" -m pip install --quiet --no-warn-script-location "$scratch" ||
        die "pip could not install mpbroker; its message is above"
    # Below another root the scripts name the place where they will be.
    [[ ! $root ]] || grep -rlIZF "$work" "$work/bin" | xargs -0r sed -i "s#$work#$2#g"
    touch "$work/.complete"
}

remove_old_programs() {
    local current old
    current=$(readlink "$root$prefix" || true)
    for old in "$root$prefix"-*; do
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

install_all() {
    local found unit below=()
    found=$(find_python) ||
        die "${python:-python3}: needs Python 3.11 or newer with venv; on Debian:" \
            "apt-get install python3-venv; or name one with --python"
    case $(readlink -f "$found") in
    /root/* | /home/*)
        say "$found lies in a home directory, which the units hide (ProtectHome=)" >&2
        [[ $root || $dry_run ]] || die "name a Python of the system's with --python"
        ;;
    esac
    command -v systemd-sysusers >/dev/null || [[ $dry_run ]] ||
        die "needs systemd-sysusers and systemd-tmpfiles (Debian: apt-get install systemd)"
    install_programs "$found"
    for unit in "${units[@]}"; do
        install_file "$source/systemd/$unit" "/etc/systemd/system/$unit"
    done
    install_file "$source/systemd/mpbroker.sysusers" /etc/sysusers.d/mpbroker.conf
    install_file "$source/systemd/mpbroker.tmpfiles" /etc/tmpfiles.d/mpbroker.conf
    install_settings
    [[ ! $root ]] || below=(--root "$root")
    run systemd-sysusers "${below[@]}" "$root/etc/sysusers.d/mpbroker.conf"
    run systemd-tmpfiles --create "${below[@]}" "$root/etc/tmpfiles.d/mpbroker.conf"
    remove_old_programs
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
        run systemctl stop 'mpbroker@*.service' || true
    fi
    for unit in "${units[@]}"; do
        file=$root/etc/systemd/system/$unit
        [[ ! -e $file ]] || run rm -f "$file"
    done
    run rm -f "$root/etc/sysusers.d/mpbroker.conf" "$root/etc/tmpfiles.d/mpbroker.conf"
    [[ ! -L $root$prefix ]] || run rm -f "$root$prefix"
    for file in "$root$prefix"-*; do
        [[ ! -e $file/pyvenv.cfg ]] || run rm -rf "$file"
    done
    ! has_systemd || run systemctl daemon-reload
    say "left as they are: /etc/mpbroker, /var/lib/mpbroker and the user mpbroker"
}

"${action}_all"
