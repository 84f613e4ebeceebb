"""The shell around horovodrun and sshd: a key for the job, made when it starts, and host keys that are checked.

One pair of keys is all: whoever has its private half is in the job. It opens the hosts' doors, and by it a host shows
that it is one; so the launcher knows every host's key beforehand. Kubeflow's MPI operator makes a pair for each job and
puts it where `KEYS` says; under Docker Compose `MAKE_KEYS` does.
"""

from __future__ import annotations

from tfdist.render.wanted import PORT

KEYS = "/keys"  # id_rsa, id_rsa.pub and authorized_keys: the names that the MPI operator gives them

MAKE_KEYS = f"""\
umask 077
cd {KEYS}
ssh-keygen -q -t ed25519 -N '' -C '' -f new
cp new.pub authorized_keys
mv new.pub id_rsa.pub
mv new id_rsa
"""

# Without root, as the image's user, for whom alone it lets in. The MPI operator's files belong to root and may be
# read by all in the pod, which StrictModes would refuse.
SSHD = (
    *("/usr/sbin/sshd", "-De", "-f", "/dev/null", "-p", str(PORT), "-h", f"{KEYS}/id_rsa"),
    *("-o", f"AuthorizedKeysFile={KEYS}/authorized_keys", "-o", "StrictModes=no", "-o", "PidFile=none"),
    *("-o", "UsePAM=no", "-o", "PasswordAuthentication=no", "-o", "KbdInteractiveAuthentication=no"),
    *("-o", "LogLevel=ERROR"),  # else every look whether it answers is a line
)
ANSWERS = ("ssh-keyscan", "-p", str(PORT), "127.0.0.1")  # whether it does

_LAUNCH = f"""\
# horovodrun tells ssh not to check host keys. Of a setting ssh takes the first that it is told.
bin=$(mktemp -d)
echo "* $(cat {KEYS}/id_rsa.pub)" > $bin/known_hosts
cat > $bin/ssh <<END
#!/bin/sh
exec $(command -v ssh) -o StrictHostKeyChecking=yes -o UserKnownHostsFile=$bin/known_hosts "\\$@"
END
chmod +x $bin/ssh
PATH=$bin:$PATH exec horovodrun --gloo -np %d %s -p {PORT} -i {KEYS}/id_rsa "$@"
"""


def launcher(ranks: int, hosts: str, command: tuple[str, ...]) -> list[str]:
    """The launcher's command line.

    Args:
        ranks: their number.
        hosts: horovodrun's option for the hosts, as it is written: "-H a:1,b:1" or "--hostfile /etc/hosts".
        command: what every rank runs.
    """
    return ["sh", "-ec", _LAUNCH % (ranks, hosts), "horovodrun", *command]
