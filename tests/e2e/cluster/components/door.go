package main

import (
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
)

// door INIT TARGET makes TARGET, an address in the network of the process INIT, reachable from where it is called, and
// prints the address at which it is from now on (the kernel chooses the port) and the pid of the process that keeps it open.
//
// A socket stays in the network in which it was opened. So one is opened here and handed to a second process over there,
// which connects each client to TARGET. That process is in INIT's pid namespace and ends with it: nothing has to be set
// up on the host, and nothing put back.
func door() {
	switch len(os.Args) {
	case 2:
		answer(os.Args[1])
	case 3:
		open(os.Args[1], os.Args[2])
	default:
		fail(fmt.Errorf("usage: door INIT TARGET"))
	}
}

func open(init, target string) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	fail(err)
	socket, err := listener.(*net.TCPListener).File()
	fail(err)
	self, err := filepath.Abs(os.Args[0])
	fail(err)
	inner := exec.Command("nsenter", "--target", init, "--net", "--pid", "--mount", "--", self, target)
	inner.ExtraFiles = []*os.File{socket} // becomes descriptor 3
	inner.Stderr = os.Stderr
	fail(inner.Start())
	fmt.Println(listener.Addr(), inner.Process.Pid)
}

func answer(target string) {
	listener, err := net.FileListener(os.NewFile(3, "door"))
	fail(err)
	for {
		outside, err := listener.Accept()
		fail(err)
		go func() {
			inside, err := net.Dial("tcp", target)
			if err != nil {
				// The client sees what it would see of a server that is not there.
				outside.Close()
				return
			}
			go join(inside, outside)
			join(outside, inside)
		}()
	}
}

// join copies one direction, and closes both ends when it is done: TLS does not go on half open.
func join(to, from net.Conn) {
	_, _ = io.Copy(to, from)
	to.Close()
	from.Close()
}

func fail(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "door:", err)
		os.Exit(1)
	}
}
