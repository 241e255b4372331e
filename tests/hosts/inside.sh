#!/usr/bin/env bash
# The part of the test hosts that runs inside their namespaces; tests/hosts/hosts.py calls it and sets the variables.
#
#   inside.sh rack       as PID 1 of the rack: a mount, PID and network namespace that holds all hosts and the switch
#   inside.sh add NAME   in the rack: start the host NAME (NUMBER says which), and wait until its sshd answers
#   inside.sh delay PORT SECONDS  in the rack: delay what goes to and from a host
#   inside.sh boot NAME  as PID 1 of the host: build its file system, go into it, and start its sshd
#
# RACK           a directory; a tmpfs that only the rack sees is mounted there, with the disks of all hosts
# NUMBER, PORT   of the host: the last part of its addresses and of its MAC; of its port at the switch
# NET, NET6      what comes before it;  NET_TWO: the same on the second network, empty: there is none
# NAMES          lines for /etc/hosts
# LOOPBACK_NAME  not empty: a host's own name is 127.0.1.1, as Debian and Ubuntu have it
# PYTHON_BASE    the installation behind the virtual environment of the tests
# SITES          the directories that its packages come from, with colons between
# SITE           where packages are in a virtual environment: lib/python3.X/site-packages
# SEED           scripts of a virtual environment at ~/tandem/venv, made by tests/hosts/environment.py
# PYTHON         an interpreter for what runs in the rack itself
# CHECKOUT       not empty: this host gets a copy of it that it may write, at its own path, and no ~/tandem/venv
set -euo pipefail

USER_NAME=tandem
USER_ID=7700

die() { echo "test hosts: $*" >&2; exit 1; }

rack() {
    mount -t proc proc /proc
    mount -t tmpfs -o mode=755,size=75% tmpfs "$RACK"
    ip link set lo up
    switch lan0
    [ -z "$NET_TWO" ] || switch lan1
    ip addr add "$NET.1/24" dev lan0
    ssh-keygen -q -t ed25519 -N '' -C "the test hosts" -f "$RACK/key"
    touch "$RACK/ready"
    reap
}

switch() {
    ip link add "$1" type bridge
    ip link set "$1" up
}

# What PID 1 has to do: whatever is orphaned gets reaped.
reap() {
    trap 'exit 0' TERM
    while :; do sleep 1000 & wait -n || true; done
}

add() {
    local name=$1 host=$RACK/$1
    mkdir -p "$host/root" "$host/disk/home"
    rm -f "$host/pid"
    cat /proc/sys/kernel/random/uuid > "$host/disk/boot_id"  # a new boot each time
    setsid unshare --pid --fork --mount --net --uts --ipc "$0" boot "$name" < /dev/null > "$host/boot.log" 2>&1 &
    local parent=$! child='' tries
    for tries in $(seq 200); do
        if [ -z "$child" ] && child=$(pgrep -P "$parent"); then
            plug "port$PORT" lan0 eth0 "$child" 00
            [ -z "$NET_TWO" ] || plug "port${PORT}b" lan1 eth1 "$child" 01
            echo "$child" > "$host/pid"
        fi
        [ -n "$child" ] && answers && return
        kill -0 "$parent" 2>/dev/null || break
        sleep 0.1
    done
    cat "$host/boot.log" >&2
    die "$name did not come up"
}

answers() { (exec 3<>"/dev/tcp/$NET.$NUMBER/22") 2>/dev/null; }

# PORT SWITCH INTERFACE PID NETWORK: a cable from the switch to the host whose PID 1 is PID.
plug() {
    local mac; mac=$(printf '02:77:00:00:%s:%02x' "$5" "$NUMBER")
    ip link del "$1" 2>/dev/null || true  # of a host that was killed
    ip link add "$1" type veth peer name "$3" address "$mac" netns "$4"
    ip link set "$1" master "$2" up
}

# PORT SECONDS: whatever goes to or from the host at this port of the first network takes so much longer; 0: as before.
delay() {
    local port=port$1 cable=cable$1 relay=relay$1
    if [ -e "$RACK/$relay.pid" ]; then
        kill "$(cat "$RACK/$relay.pid")"
        rm "$RACK/$relay.pid"
        ip link del "$port"
        rename_link "$cable" "$port"
        ip link set "$port" master lan0
    fi
    [ "$2" != 0 ] || return 0
    ip link set "$port" nomaster
    rename_link "$port" "$cable"
    ip link add "$port" type veth peer name "$relay"
    ip link set "$relay" up
    setsid "$PYTHON" "$(dirname "$0")/relay.py" "$cable" "$relay" "$2" < /dev/null > "$RACK/$relay.log" 2>&1 &
    echo $! > "$RACK/$relay.pid"
    ip link set "$port" master lan0 up
}

rename_link() {
    ip link set "$1" down
    ip link set "$1" name "$2"
    ip link set "$2" up
}

# Runs in the new namespaces, still with this machine's file system.
boot() {
    local name=$1 disk=$RACK/$1/disk
    mount --make-rprivate /
    hostname "$name"
    network
    mount -t tmpfs -o mode=755,size=256m tmpfs "$RACK/$name/root"
    cd "$RACK/$name/root"
    system
    names "$name"
    devices "$disk"
    mount --bind "$disk/home" home
    user
    python
    if [ -n "$CHECKOUT" ]; then checkout "$disk"; else environment "$disk"; fi
    sshd_keys "$disk"
    init
    mkdir -p old
    pivot_root . old
    cd /
    umount -l /old
    rmdir /old
    exec env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root TERM=xterm LANG=C.UTF-8 \
        /run/init < /dev/null > /var/log/init.log 2>&1
}

network() {
    local tries
    ip link set lo up
    for tries in $(seq 100); do ip link show eth0 > /dev/null 2>&1 && break; sleep 0.05; done
    ip addr add "$NET.$NUMBER/24" dev eth0
    ip -6 addr add "$NET6::$NUMBER/64" dev eth0 nodad
    ip link set eth0 up
    [ -n "$NET_TWO" ] || return 0
    for tries in $(seq 100); do ip link show eth1 > /dev/null 2>&1 && break; sleep 0.05; done
    ip addr add "$NET_TWO.$NUMBER/24" dev eth1
    ip link set eth1 up
}

system() {
    mkdir -p usr opt proc sys dev tmp run etc var/tmp var/log var/lib root home
    local link
    for link in bin sbin lib lib32 lib64 libx32; do [ ! -L /$link ] || ln -s "$(readlink /$link)" $link; done
    mount --rbind /usr usr && mount -o remount,bind,ro usr
    mount --rbind /opt opt && mount -o remount,bind,ro opt
    cp -a /etc/. etc/
    mount -t proc proc proc
    mount -t sysfs -o ro sysfs sys
    [ ! -d sys/fs/cgroup ] || mount --rbind /sys/fs/cgroup sys/fs/cgroup
    chmod 1777 var/tmp
}

names() {
    echo "$1" > etc/hostname
    local own others
    own=$(grep " $1\$" <<< "$NAMES")
    others=$(grep -v " $1\$" <<< "$NAMES")
    [ -z "$LOOPBACK_NAME" ] || own="127.0.1.1 $1"
    printf '%s\n' "127.0.0.1 localhost" "::1 localhost" "$own" "$others" > etc/hosts
    rm -f etc/resolv.conf && : > etc/resolv.conf  # no names from elsewhere
}

devices() {
    cat "$1/boot_id" > run/boot_id  # another machine has another one
    mount --bind run/boot_id proc/sys/kernel/random/boot_id
    mount -t tmpfs -o mode=755,size=1m tmpfs dev
    mkdir -p dev/shm dev/pts
    local node
    for node in null zero full random urandom tty; do touch dev/$node && mount --bind /dev/$node dev/$node; done
    ln -s /proc/self/fd dev/fd; ln -s /proc/self/fd/0 dev/stdin
    ln -s /proc/self/fd/1 dev/stdout; ln -s /proc/self/fd/2 dev/stderr
    mount -t tmpfs -o mode=1777,size=6g tmpfs dev/shm
    mount -t devpts -o newinstance,ptmxmode=0666,mode=620,gid=5 devpts dev/pts
    ln -s pts/ptmx dev/ptmx
    mount -t tmpfs -o mode=1777,size=4g tmpfs tmp
}

user() {
    grep -q "^$USER_NAME:" etc/passwd || {
        echo "$USER_NAME:x:$USER_ID:$USER_ID::/home/$USER_NAME:/bin/bash" >> etc/passwd
        echo "$USER_NAME:x:$USER_ID:" >> etc/group
        echo "$USER_NAME:*:19000:0:99999:7:::" >> etc/shadow
    }
    [ ! -d home/$USER_NAME ] || return 0  # it was there before
    mkdir -p home/$USER_NAME/.ssh
    cp /etc/skel/.[a-z]* home/$USER_NAME/
    cp "$RACK/key.pub" home/$USER_NAME/.ssh/authorized_keys
    [ -z "$CHECKOUT" ] || cp "$RACK/key" home/$USER_NAME/.ssh/id_ed25519
    chmod 700 home/$USER_NAME/.ssh
    # What was compiled of these sources here: each host would begin with a minute of that.
    [ ! -d "$KERNELS" ] || {
        mkdir -p home/$USER_NAME/.cache/tandem/kernels
        cp -r "$KERNELS" home/$USER_NAME/.cache/tandem/kernels/
    }
    chown -R $USER_ID:$USER_ID home/$USER_NAME
}

# A directory of this machine at the same path, to read only.
mirror() {
    [ -d "$1" ] && [ ! -e ".$1" ] || return 0
    mkdir -p ".$1"
    mount --bind "$1" ".$1" && mount -o remount,bind,ro ".$1"
}

python() { mirror "$PYTHON_BASE"; }

# ~/tandem/venv with all packages of the tests' environment but Tandem itself; what is installed stays on the disk.
environment() {
    local venv=home/$USER_NAME/tandem/venv disk=$1
    [ -d $venv ] || {
        mkdir -p $venv
        cp -a "$SEED/." $venv/
        mkdir -p "$venv/$SITE" "$disk/site" "$disk/site.work"
        chown -R $USER_ID:$USER_ID home/$USER_NAME/tandem "$disk/site"
    }
    mount -t overlay -o "lowerdir=$SITES,upperdir=$disk/site,workdir=$disk/site.work" overlay "$venv/$SITE"
    [ ! -e "$disk/site.pruned" ] || return 0
    # Tandem from a checkout, and paths that are not there.
    rm -rf "$venv/$SITE"/__editable__* "$venv/$SITE"/tandem_serving-*.dist-info
    local file
    for file in "$venv/$SITE"/*.pth; do grep -q '^import' "$file" || rm -f "$file"; done
    touch "$disk/site.pruned"
}

# The machine of whoever administrates: the checkout with its environment, writable, where it is out here.
checkout() {
    local disk=$1 place
    mkdir -p ".$CHECKOUT" "$disk/checkout" "$disk/checkout.work"
    chown $USER_ID:$USER_ID "$disk/checkout"
    mount -t overlay -o "lowerdir=$CHECKOUT,upperdir=$disk/checkout,workdir=$disk/checkout.work" overlay ".$CHECKOUT"
    # What was built out here is not the desk's; its environment is whole, and `make` could get nothing new.
    rm -rf ".$CHECKOUT"/{build,dist} ".$CHECKOUT"/*.egg-info
    find ".$CHECKOUT" -maxdepth 1 -type f -exec chown $USER_ID:$USER_ID {} +  # for a person to edit
    [ ! -d ".$PREFIX" ] || find ".$PREFIX" -maxdepth 1 -name '.stamp-*' -exec touch {} +
    for place in ${SITES//:/ } "$PREFIX"; do mirror "$place"; done
}

sshd_keys() {
    mkdir -p run/sshd "$1/ssh"
    chmod 755 run/sshd
    rm -f etc/ssh/ssh_host_*
    [ -e "$1/ssh/ssh_host_ed25519_key" ] || ssh-keygen -q -t ed25519 -N '' -f "$1/ssh/ssh_host_ed25519_key"
    cp "$1"/ssh/* etc/ssh/
    cat > etc/ssh/sshd_config <<-CONFIG
	HostKey /etc/ssh/ssh_host_ed25519_key
	PasswordAuthentication no
	UsePAM no
	MaxStartups 100
	MaxSessions 100
	AcceptEnv LANG LC_*
	CONFIG
}

# PID 1. Nothing of this machine's environment stays.
init() {
    cat > run/init <<-'INIT'
	#!/bin/bash
	ulimit -Hn 1048576; ulimit -Sn 1024
	/usr/sbin/sshd -D -e 2>>/var/log/sshd.log &
	trap 'exit 0' TERM
	while :; do sleep 1000 & wait -n; done
	INIT
    chmod 755 run/init
}

case ${1:-} in
    rack) rack ;;
    add) add "$2" ;;
    delay) delay "$2" "$3" ;;
    boot) boot "$2" ;;
    *) die "what is to be done: rack, add NAME, delay PORT SECONDS or boot NAME" ;;
esac
