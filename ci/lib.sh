# Shared by the scripts of this folder; sourced, never run.
# Sets: root (the checkout), venv, python (the one inside venv), cache (models and unpacked builds).

root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"
venv="$root/.venv"
python="$venv/bin/python"
cache="${XDG_CACHE_HOME:-$HOME/.cache}/splitctl"

# stdout belongs to results (a path, a JSON line), so everything said to a person goes to stderr.
say() { printf '%s: %s\n' "${0##*/}" "$*" >&2; }
die() {
    say "$*"
    exit 1
}

# True where this script may install Debian packages by itself: on a CI machine, as root, with apt.
may_apt() { [[ "${CI:-}" == true && "$(id -u)" == 0 ]] && command -v apt-get >/dev/null; }

apt_updated=0
apt_install() {
    say "installing $* with apt-get"
    if [[ $apt_updated == 0 ]]; then
        apt-get update -qq >&2
        apt_updated=1
    fi
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >&2
}
