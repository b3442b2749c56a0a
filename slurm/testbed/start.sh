#!/usr/bin/env bash
# start.sh DIR: a private Slurm of four pretend nodes with two GPUs each, for root or a plain user. All it writes is in
# DIR. Prints the line that points Slurm's commands at it: eval "$(slurm/testbed/start.sh DIR)". Again: restarts what died.
set -euo pipefail
export PATH=$PATH:/usr/sbin:/sbin
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "${1:?usage: start.sh DIR}"
dir=$(cd "$1" && pwd)
nodes=(n1 n2 n3 n4)
wait_s=${TESTBED_WAIT_S:-60}

fail() { echo "start.sh: $*" >&2; exit 1; }

alive() { # alive NAME COMMAND: whether DIR/NAME.pid names a living process of that command (a dead one has no words)
    local word=
    [ -s "$dir/$1.pid" ] || return 1
    read -r -d '' word 2> /dev/null < "/proc/$(cat "$dir/$1.pid")/cmdline" || true
    [ "$word" = "$2" ]
}

free() { ! (exec 3<> "/dev/tcp/127.0.0.1/$1") 2> /dev/null; }

free_ports() { # five free ports in a row, below the range that the kernel hands out by itself
    local first tries port
    for tries in $(seq 100); do
        first=$((10000 + (RANDOM % 4000) * 5))
        for port in $(seq "$first" $((first + 4))); do free "$port" || continue 2; done
        echo "$first"
        return
    done
    fail "found no five free ports in $tries tries"
}

configure() { # slurm.conf and gres.conf
    local first host script i
    first=$(free_ports)
    host=$(hostname -s)
    script="s|@DIR@|$dir|g; s|@HOST@|$host|g; s|@USER@|$(id -un)|g"
    for i in 0 1 2 3 4; do script+="; s|@PORT$i@|$((first + i))|g"; done
    sed "$script" "$here/slurm.conf.in" > "$dir/slurm.conf"
    # A GPU's file has to be a device. Any two will do: nobody opens them, Slurm only counts them.
    echo "NodeName=n[1-4] Name=gpu Type=h100 File=/dev/null,/dev/zero" > "$dir/gres.conf"
}

daemons() { # start each that does not run; none may inherit the lock (descriptor 9)
    local node
    alive munged munged || munged --force --key-file="$dir/munge.key" --socket="$dir/munge.sock" \
        --pid-file="$dir/munged.pid" --log-file="$dir/log/munged.log" --seed-file="$dir/munge.seed"
    alive slurmctld slurmctld || slurmctld -f "$SLURM_CONF"
    for node in "${nodes[@]}"; do alive "slurmd-$node" slurmd || slurmd -N "$node" -f "$SLURM_CONF"; done
}

ready() { [ "$(sinfo -h -N -p normal -o %t 2> /dev/null | grep -cE '^(idle|alloc|mix|comp)$')" -eq ${#nodes[@]} ]; }

await_nodes() {
    local end=$((SECONDS + wait_s))
    until ready; do
        if [ "$SECONDS" -ge "$end" ]; then
            tail -n 5 "$dir"/log/*.log >&2
            sinfo -N -l >&2 || true
            fail "not all of ${nodes[*]} came up within $wait_s s"
        fi
        sleep 0.1
    done
}

command -v slurmctld slurmd munged > /dev/null || fail "Slurm is not installed: run $here/install.sh"
[ ${#dir} -le 80 ] || fail "$dir is too long a path for the sockets in it: choose one of at most 80 characters"
export SLURM_CONF=$dir/slurm.conf
chmod 755 "$dir" # munged refuses a directory that others may write to
mkdir -p "$dir"/{log,state} "${nodes[@]/#/$dir/}"
[ -s "$dir/munge.key" ] || (umask 077 && head -c 128 /dev/urandom > "$dir/munge.key")

# One start at a time on this host: between choosing ports and taking them nobody else may choose.
lock=/tmp/yoke-testbed.lock
[ -e "$lock" ] || (umask 022 && : >> "$lock") 2> /dev/null || true
exec 9< "$lock"
flock --wait "$wait_s" 9 || fail "another start.sh held $lock for $wait_s s"
alive slurmctld slurmctld || configure
daemons 9<&-
await_nodes
exec 9<&-
echo "export SLURM_CONF=$SLURM_CONF"
