#!/usr/bin/env bash
# Puts a real Apptainer into $1 for the tests of its sandbox, without changing the system. Default: /opt/yoke-apptainer,
# for a user that is not root $YOKE_HOME/apptainer.
# Debian has it in its newest suite only, so it comes with that suite's C library, found by a path of its own.
# Needs a Debian machine; as root it also installs what .sif images need. `export PATH=$1/usr/bin:$PATH` to use it.
set -euo pipefail
prefix=${YOKE_HOME:-$HOME/.cache/yoke}/apptainer
[ "$(id -u)" -ne 0 ] || prefix=/opt/yoke-apptainer # where other users can read it
prefix=${1:-$prefix}
if [ -x "$prefix/usr/bin/apptainer" ]; then
    "$prefix/usr/bin/apptainer" --version
    exit
fi
if [ "$(id -u)" -eq 0 ]; then
    timeout 120 apt-get install -y -qq --no-install-recommends squashfs-tools squashfuse >/dev/null ||
        echo "no squashfs-tools: tests with .sif images are skipped" >&2
fi
mkdir -p "$(dirname "$prefix")"
work=$(mktemp -d "$prefix.XXXXXX")
trap 'rm -rf "$work"' EXIT
repo=$(apt-get indextargets 'Created-By: Packages' 'Origin: Debian' 'Component: main' --format '$(REPO_URI)' | head -1)
mkdir -p "$work"/apt/{lists,cache/archives}/partial "$work"/{debs,new/usr}
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $repo sid main" >"$work/apt/sources"
private=(-o "Dir::Etc::SourceList=$work/apt/sources" -o "Dir::Etc::SourceParts=-" -o "Dir::State::Lists=$work/apt/lists"
    -o "Dir::Cache=$work/apt/cache" -o "APT::Sandbox::User=$(id -un)" -o "Acquire::Languages=none")
timeout 120 apt-get "${private[@]}" -qq update
cd "$work/debs"
timeout 120 apt-get "${private[@]}" -qq download apptainer libc6 libsqlite3-0 libseccomp2
timeout 60 apt-get -qq -o "APT::Sandbox::User=$(id -un)" download patchelf
for package in *.deb; do dpkg -x "$package" "$work/x"; done
cp -r "$work/x/etc" "$work/x/usr/bin" "$work/x/usr/lib" "$work/new/usr"
mv "$work/new/usr/lib/x86_64-linux-gnu" "$work/new/usr/lib/all"
mkdir -p "$work/new/usr/lib/x86_64-linux-gnu" "$work/new/lib"
mv "$work/new/usr/lib/all/apptainer" "$work/new/usr/lib/x86_64-linux-gnu"
mv "$work/new/usr/lib/all"/* "$work/new/lib"
rmdir "$work/new/usr/lib/all"
for program in usr/bin/apptainer usr/lib/x86_64-linux-gnu/apptainer/bin/starter; do
    "$work/x/usr/bin/patchelf" --set-interpreter "$prefix/lib/ld-linux-x86-64.so.2" --force-rpath --set-rpath "$prefix/lib" \
        "$work/new/$program"
done
# It looks for its settings and its mount point below the folder of each of its two programs.
mkdir -p "$work/new/usr/var/lib/apptainer/mnt/session"
ln -s ../etc ../var "$work/new/usr/lib/"
mv "$work/new" "$prefix"
chmod -R a+rX "$prefix"
"$prefix/usr/bin/apptainer" --version
