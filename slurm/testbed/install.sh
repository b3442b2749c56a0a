#!/usr/bin/env bash
# install.sh: Debian's Slurm, for the testbed. Does nothing when it is there; says what to ask for when it may not.
set -euo pipefail
export PATH=$PATH:/usr/sbin:/sbin
packages=(slurm-wlm slurm-wlm-basic-plugins munge)

complete() { command -v slurmctld slurmd slurmstepd munged sbatch sinfo > /dev/null; }

if complete; then exit 0; fi
command="apt-get install --yes --no-install-recommends ${packages[*]}"
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get > /dev/null; then
    echo "install.sh: Slurm is missing, and only root on Debian or Ubuntu can install it." >&2
    echo "install.sh: ask your administrator for: $command" >&2
    exit 1
fi
exec 9< "$0"
flock 9 # two test runs may want it at once
if complete; then exit 0; fi
export DEBIAN_FRONTEND=noninteractive
apt-get update --quiet=2
# The packages start daemons for the whole machine where there is an init system. The testbed wants none of those.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    trap 'rm -f "$policy"' EXIT
    printf '#!/bin/sh\nexit 101\n' > "$policy"
    chmod 755 "$policy"
fi
$command > /dev/null
complete || { echo "install.sh: '$command' left some of Slurm's programs missing" >&2; exit 1; }
