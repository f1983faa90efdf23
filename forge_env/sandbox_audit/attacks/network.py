"""Connections to the outside or to a neighbouring sandbox."""

from __future__ import annotations

from forge_env.sandbox_audit.attacks.attack import ATTEMPT, Attack

_CONNECT = """\
import socket
def connect(family, kind, address, protocol=0):
    try:
        with socket.socket(family, kind, protocol) as s:
            s.settimeout(0.2); s.connect(address); s.send(b'x'); print('LEAK', address)
    except OSError: pass
"""

NETWORK = (
    Attack("internet", "network", "Reach the internet over TCP and UDP.", _CONNECT + """\
for port in (53, 80, 443):
    for kind in (1, 2): connect(2, kind, ('1.1.1.1', port))
"""),
    Attack("internet, version 6", "network",
           "Reach the internet over version 6 of its protocol, and over addresses of version 4 within it.",
           _CONNECT + """\
for address in ('2606:4700:4700::1111', '::ffff:1.1.1.1', 'fe80::1', 'ff02::1'):
    for kind in (1, 2): connect(10, kind, (address, 53))
"""),
    Attack("names", "network", "Resolve names, by the library and by asking the usual servers.", """\
import socket
try: print('LEAK', socket.getaddrinfo('example.com', 80))
except OSError: pass
question = bytes.fromhex('123401000001000000000000076578616d706c6503636f6d0000010001')
for server in ('8.8.8.8', '127.0.0.11', '127.0.0.53', '10.0.2.3', '172.17.0.1'):
    try:
        s = socket.socket(2, 2); s.settimeout(0.05); s.sendto(question, (server, 53)); s.recv(99); print('LEAK', server)
    except OSError: pass
"""),
    Attack("host and its services", "network",
           "Reach the host: gateways, metadata services, the Docker API.", _CONNECT + """\
for host in ('172.17.0.1', '10.0.2.2', '169.254.169.254', '192.168.0.1', '192.168.65.2', '100.100.100.200'):
    for port in (22, 80, 2375, 2376): connect(2, 1, (host, port))
    connect(2, 2, (host, 53))
"""),
    Attack("loopback", "network", "Find anything that listens on the loopback device.", """\
import socket
for port in range(1, 32768):
    if port > 12000 and port % 97: continue
    s = socket.socket(); s.setblocking(False)
    try:
        if s.connect_ex(('127.0.0.1', port)) == 0: print('LEAK', port)
    except OSError: break
    s.close()
for table in ('tcp', 'tcp6', 'udp', 'udp6', 'raw', 'packet', 'netlink'):
    try:
        if len(open(f'/proc/net/{table}').read().splitlines()) > 1 and table != 'netlink': print('LEAK', table)
    except OSError: pass
"""),
    Attack("interfaces", "network", "Find a network interface beside the loopback device, or bring one up.", """\
import fcntl, socket, struct
usual = ('lo', 'tunl', 'sit', 'ip6', 'gre', 'erspan', 'ip_vti', 'teql', 'dummy', 'ifb')  # what every namespace has
for _, name in socket.if_nameindex():
    if not name.startswith(usual): print('LEAK', name)
try: fcntl.ioctl(socket.socket(2, 2), 0x8914, struct.pack('16sh22x', b'lo', 0x49)); print('LEAK lo')
except OSError: pass
""", unguarded="root"),
    Attack("raw sockets", "network", "Forge packets with raw sockets.", ATTEMPT + """\
import socket
for family in (2, 10):
    for protocol in (1, 6, 17, 58, 255):
        attempt(lambda: socket.socket(family, socket.SOCK_RAW, protocol), family, protocol)
""", unguarded="root"),
    Attack("packet sockets", "network", "Listen to the wire.", ATTEMPT + """\
import socket
for kind in (2, 3, 10):
    for protocol in (0x0003, 0x0300, 0x0008):
        attempt(lambda: socket.socket(17, kind, protocol), kind)
""", unguarded="root"),
    Attack("netlink", "network", "Query and change the kernel's network, audit and device services.", ATTEMPT + """\
import socket
for protocol in range(32):
    attempt(lambda: socket.socket(16, socket.SOCK_RAW, protocol), protocol)
""", unguarded="user"),
    Attack("every other family", "network",
           "Open a socket of any family except internet and local sockets.", ATTEMPT + """\
import socket
for family in set(range(3, 64)) - {10}:
    for kind in (1, 2, 3, 4, 5, 6):
        attempt(lambda: socket.socket(family, kind, 0), family, kind)
        try: socket.socketpair(family, kind); print('LEAK pair', family, kind)
        except OSError as error:
            if error.errno == 95: print('LEAK pair', family, kind)  # the family's own code has answered
""", unguarded="user"),
    Attack("every other protocol", "network",
           "Open internet sockets of rare protocols, whose kernel code has a record of escapes.", """\
import socket
for kind, protocol in ((5, 132), (1, 132), (6, 33), (2, 136), (1, 262), (3, 255), (2, 1)):
    for family in (2, 10):
        try: socket.socket(family, kind, protocol)
        except OSError: continue
        if protocol != 1: print('LEAK', family, kind, protocol)
"""),
    Attack("virtual machine's host", "network", "Reach the hypervisor through a virtual machine's sockets.", """\
import socket
for cid in (0, 1, 2, 3):
    for port in (22, 1024, 2375):
        try:
            s = socket.socket(40, 1); s.settimeout(0.1); s.connect((cid, port)); print('LEAK', cid, port)
        except (OSError, AttributeError): pass
"""),
    Attack("abstract sockets", "network",
           "Connect to local sockets without a path, such as those of containerd, D-Bus and X11.", ATTEMPT + """\
import socket
for line in open('/proc/net/unix').read().splitlines()[1:]:
    fields = line.split()
    if len(fields) > 7:
        for kind in (1, 2, 5):
            attempt(lambda: socket.socket(1, kind).connect(fields[7].replace('@', '\\0', 1)), fields[7])
for name in ('/tmp/.X11-unix/X0', '/containerd-shim/moby', '/tmp/dbus-', 'server'):
    for kind in (1, 2, 5):
        attempt(lambda: socket.socket(1, kind).connect('\\0' + name), name)
"""),
    Attack("a neighbour's name", "network",
           "Meet a neighbour at an agreed abstract name, and find out whether another process has it.", """\
import socket, time
s = socket.socket(1, 2)
try: s.bind('\\0forge-env-meeting')
except OSError: print('LEAK taken')
s.settimeout(0.1)
try: print('LEAK', s.recv(9))
except OSError: pass
"""),
    Attack("broadcast", "network", "Reach neighbours by broadcast and multicast.", ATTEMPT + """\
import socket
s = socket.socket(2, 2); s.setsockopt(1, 6, 1)
for address in ('255.255.255.255', '224.0.0.1', '172.17.255.255', '239.255.255.250'):
    attempt(lambda: s.sendto(b'x', (address, 1900)), address)
"""),
    Attack("forged credentials", "network", "Claim to be another process or user over a local socket.", ATTEMPT + """\
import os, socket, struct
a, b = socket.socketpair(1, 2); b.setsockopt(1, 16, 1)
for pid, uid in ((1, os.getuid()), (os.getpid(), 0), (1, 0), (os.getppid(), os.getuid() + 1)):
    attempt(lambda: a.sendmsg([b'x'], [(1, 2, struct.pack('3i', pid, uid, uid))]), pid, uid)
""", unguarded="root"),
    Attack("tunnels and filters", "network",
           "Make an interface of its own, attach programs to sockets, change routes and firewalls.", ATTEMPT + """\
import fcntl, os, socket, struct
for path in ('/dev/net/tun', '/dev/net/tap', '/dev/ppp', '/dev/vhost-net'):
    attempt(lambda: os.open(path, os.O_RDWR), path)
s = socket.socket(2, 2)
for level, option, value in ((1, 12, 7), (1, 36, 1), (0, 64, b'filter' + bytes(78)), (1, 25, b'eth0'), (1, 32, 1)):
    attempt(lambda: s.setsockopt(level, option, value), level, option)
""", unguarded="root"),
)  # fmt: skip
