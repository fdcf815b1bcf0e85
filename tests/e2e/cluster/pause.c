/* Does nothing, which is what both a pod's sandbox and a pid namespace need somebody for: they live as long as this does.
 * Children that lose their parent become this one's; ignoring SIGCHLD makes the kernel reap them. */
#include <signal.h>
#include <unistd.h>

static void quit(int signal) {
	(void)signal;
	_exit(0);
}

int main(void) {
	signal(SIGCHLD, SIG_IGN);
	/* The first process of a pid namespace gets only the signals that it has a handler for. */
	signal(SIGINT, quit);
	signal(SIGTERM, quit);
	for (;;)
		pause();
}
