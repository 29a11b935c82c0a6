#!/bin/busybox sh
# First process of a guest: mount this machine's root below an overlay, then go there.
/bin/busybox --install -s /bin
export PATH=/bin
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev
for m in @EARLY@; do modprobe $m; done
mkdir -p /lower /over /new
mount -t 9p -o trans=virtio,version=9p2000.L,ro,cache=loose,msize=524288 root /lower \
  || { echo "GUEST_FAILED: no 9p root"; poweroff -f; }
mount -t tmpfs -o size=75% tmpfs /over; mkdir /over/u /over/w
mount -t overlay -o lowerdir=/lower,upperdir=/over/u,workdir=/over/w overlay /new \
  || { echo "GUEST_FAILED: no overlay"; poweroff -f; }
for d in proc sys dev; do mkdir -p /new/$d; mount --move /$d /new/$d; done
mkdir -p /new/dev/shm /new/dev/pts /new/run /new/share /new/lib/modules /new/guest
mount -t devpts devpts /new/dev/pts; mount -t tmpfs tmpfs /new/dev/shm; mount -t tmpfs tmpfs /new/run
cp -a /lib/modules /new/guest/; cp /guest.sh /bin/busybox /new/guest/; cp /net.sh /new/guest/guest-net
exec switch_root /new /guest/busybox sh /guest/guest.sh
