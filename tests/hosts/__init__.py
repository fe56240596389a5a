"""Hosts on one machine: namespaces with a network, an sshd and files of their own (`cluster.py`).

    with Cluster(count=3) as cluster:
        cluster.ssh("h2", "hostname").stdout      "h2"
        cluster.cut("h2")                         as if its cable had been pulled

Needs root, and these Debian packages: iproute2, nftables, openssh-client, openssh-server,
util-linux. `missing()` says what is not here; nothing is ever installed.
"""
