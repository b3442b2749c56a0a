#!/usr/bin/env bash
# stop.sh DIR: end the Slurm that start.sh DIR started, its jobs and every process of theirs. Files stay in DIR.
set -uo pipefail
dir=$(cd "${1:?usage: stop.sh DIR}" && pwd) || exit 1
export SLURM_CONF=$dir/slurm.conf
wait_s=10

within() { # within SECONDS CONDITION...: poll until it holds
    local end=$((SECONDS + $1))
    shift
    until "$@"; do
        [ "$SECONDS" -lt "$end" ] || return 1
        sleep 0.1
    done
}

daemons() { # pids of this testbed's daemons, by pid file; a pid that now belongs to another program is not ours
    local file command word
    for file in "$dir"/slurmd-n[1-4].pid "$dir"/slurmctld.pid "$dir"/munged.pid; do
        [ -s "$file" ] || continue
        command=$(basename "$file" .pid) word=
        read -r -d '' word 2> /dev/null < "/proc/$(cat "$file")/cmdline"
        if [ "$word" = "${command%-n[1-4]}" ]; then cat "$file"; fi
    done
}

roots() { # pids of this testbed's slurmstepd (they stand in its log directory) and of whatever has its job's environment
    local proc environment
    for proc in /proc/[0-9]*; do
        if [ "$(cat "$proc/comm" 2> /dev/null)" = slurmstepd ]; then
            [ "$(readlink "$proc/cwd")" != "$dir/log" ] || echo "${proc#/proc/}"
        fi
    done
    for environment in $(grep -slzxF "SLURM_CONF=$SLURM_CONF" /proc/[0-9]*/environ); do
        if grep -sqz '^SLURM_JOB_ID=' "$environment"; then basename "${environment%/environ}"; fi
    done
}

leftovers() { # those and all their descendants
    local mine
    mine=$(roots | tr '\n' ' ')
    [ -z "$mine" ] || ps -eo pid=,ppid= | awk -v mine="$mine" '
        { parent[$1] = $2 }
        END {
            split(mine, list, " "); for (i in list) ours[list[i]]
            for (pid in parent) for (up = pid; up > 1; up = parent[up]) if (up in ours) { print pid; break }
        }'
}

no_jobs() { [ -z "$(timeout 5 squeue -h 2> /dev/null)" ]; }
no_daemons() { [ -z "$(daemons)" ]; }
no_leftovers() {
    local left
    left=$(leftovers)
    [ -z "$left" ] || { kill -KILL $left 2> /dev/null; false; }
}

if [ -n "$(daemons)" ] && [ -e "$SLURM_CONF" ]; then # let jobs end by themselves first
    timeout 5 scancel --user="$(id -un)" 2> /dev/null
    within "$wait_s" no_jobs
fi
left=$(daemons)
[ -z "$left" ] || kill -TERM $left 2> /dev/null
within "$wait_s" no_daemons || kill -KILL $(daemons) 2> /dev/null
within "$wait_s" no_leftovers || { echo "stop.sh: these processes do not end: $(leftovers | tr '\n' ' ')" >&2; exit 1; }
rm -f "$dir"/*.pid
