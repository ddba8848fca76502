#!/usr/bin/env bash
# ./dev fresh [--user] [--keep]: makes a minimal system of this machine's own release (Debian or
# Ubuntu) with debootstrap, clones HEAD into it, and runs there what the README tells a stranger to
# run, each command twice. --user runs them as a user with sudo, --keep leaves the system on disk.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
user=root keep=0
for arg; do
  case $arg in
    --user) user=stranger ;;
    --keep) keep=1 ;;
    --inside) ;;
    *) echo "fresh: no option '$arg'; --user and --keep are" >&2 && exit 2 ;;
  esac
done

[[ $(id -u) == 0 ]] || { echo "./dev fresh makes a system with debootstrap and chroot: run it as root" >&2 && exit 1; }

# In a mount namespace of its own, nothing that is mounted below outlives this script.
if [[ " $* " != *" --inside "* ]]; then
  exec unshare --mount --propagation private -- "$0" --inside "$@"
fi

# shellcheck source=/dev/null
. /etc/os-release
release=${VERSION_CODENAME:?this system has no code name; ./dev fresh knows Debian and Ubuntu}
# The mirror, its options and its proxy are those that this machine's apt uses.
read_sources() {
  # shellcheck disable=SC2016  # apt's own variables
  sources=$(apt-get indextargets --format '$(CODENAME) deb $(REPO_URI) $(RELEASE) $(COMPONENT)' 'Created-By: Packages' |
    sed -n "s/^$release\(-updates\|-security\)\? //p" | sort -u)
  mirror=$(awk -v release="$release" '$3 == release && $4 == "main" { print $2; exit }' <<<"$sources")
}
read_sources
[[ -n $mirror ]] || { apt-get update >/dev/null 2>&1 && read_sources; }
[[ -n $mirror ]] || { echo "apt here knows no mirror of $release" >&2 && exit 1; }

system=$(mktemp -d /var/tmp/shunt-fresh.XXXXXX)
chmod 755 "$system"
leave() {
  local code=$?
  trap - EXIT
  umount --lazy "$system/proc" 2>/dev/null || true
  umount --lazy "$system/dev" 2>/dev/null || true
  if ((keep)); then
    echo "kept: $system"
  elif ! grep -q " $system/" /proc/self/mounts; then
    rm -rf --one-file-system "$system"
  fi
  exit "$code"
}
trap leave EXIT
trap 'exit 130' INT TERM

start=$SECONDS
include=ca-certificates
[[ $user == root ]] || include+=,sudo
debootstrap --variant=minbase --include="$include" "$release" "$system" "$mirror" >"$system.log" 2>&1 ||
  { tail -n 20 "$system.log" >&2 && exit 1; }
rm -f "$system.log"
echo "a bare $PRETTY_NAME in $((SECONDS - start)) s: $(du -sm --one-file-system "$system" | cut -f1) MB, no compiler, no CMake"

printf '%s\n' "$sources" >"$system/etc/apt/sources.list"
apt-config dump | grep -E '^Acquire::(http|https|Retries)' >"$system/etc/apt/apt.conf.d/90mirror" || true
for file in /etc/resolv.conf /etc/hosts /etc/ssl/certs/ca-certificates.crt; do
  [[ ! -e $file ]] || cp -L "$file" "$system$file"
done
mountpoint -q "$system/proc" || mount -t proc proc "$system/proc"
mount --rbind /dev "$system/dev"
mount --make-rslave "$system/dev"

home=/root
if [[ $user != root ]]; then
  home=/home/$user
  chroot "$system" useradd --create-home --shell /bin/bash "$user"
  echo "$user ALL=(ALL) NOPASSWD: ALL" >"$system/etc/sudoers.d/$user"
fi
git clone --quiet --no-local "$root" "$system$home/shunt"
chroot "$system" chown -R "$user:" "$home/shunt"

# Only what a login would set, and the proxy if there is one.
environment=(HOME="$home" USER="$user" PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin TERM="${TERM:-dumb}" LANG=C.UTF-8)
for name in http_proxy https_proxy no_proxy HTTP_PROXY HTTPS_PROXY NO_PROXY; do
  [[ -z ${!name:-} ]] || environment+=("$name=${!name}")
done
inside() {
  local from=$EPOCHREALTIME
  printf '\n$ %s\n' "$*"
  chroot --userspec="$user" "$system" env -i "${environment[@]}" bash -c 'cd ~/shunt && exec "$@"' - "$@" </dev/null
  from=$(((${EPOCHREALTIME/[.,]/} - ${from/[.,]/}) / 10000))
  printf '[%s: %d.%02d s]\n' "$*" $((from / 100)) $((from % 100))
}
inside ./dev run
inside ./dev run
inside ./dev test
inside ./dev test
