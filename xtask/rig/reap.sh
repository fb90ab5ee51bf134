# reap.sh NANOSECONDS OPTIONS...: inside the guest, `sheaf bench reap device OPTIONS` on a null_blk device that takes so long for each
# transfer, polled or not, and has a queue that is polled beside the ordinary one. It keeps no content, and has no volatile cache.
# The report comes between two lines that begin with REPORT.
set -e
service=$1
shift
modprobe null_blk_t nr_devices=0
mount -t configfs none /sys/kernel/config 2>/dev/null || true
config=/sys/kernel/config/nullb/nullb0
mkdir $config
echo 1024 >$config/size
echo 2 >$config/irqmode
echo "$service" >$config/completion_nsec
echo 1 >$config/poll_queues
echo 1 >$config/power
if ./sheaf bench reap device --device /dev/nullb0 --json "$@" >report.json 2>messages; then
  echo REPORT-BEGIN
  cat report.json
  echo REPORT-END
else
  status=$?
  tail -n 20 messages
  exit $status
fi
