// One program that is every part of Kubernetes which the tests need, by the name it is called by: linked once instead
// of seven times, which is most of what building them costs.
package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sort"
	"strings"

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/server/v3/etcdmain"
	"k8s.io/component-base/cli"
	// What the components register by being linked in: the JSON log and metrics of their own build and clients.
	_ "k8s.io/component-base/logs/json/register"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	kubectl "k8s.io/kubectl/pkg/cmd"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllers "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	proxy "k8s.io/kubernetes/cmd/kube-proxy/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

// Components are cobra commands that end with cli.Run's code; what is not has a function of its own.
var components = map[string]func() *cobra.Command{
	"kube-apiserver":          apiserver.NewAPIServerCommand,
	"kube-controller-manager": controllers.NewControllerManagerCommand,
	"kube-proxy":              proxy.NewProxyCommand,
	"kube-scheduler":          func() *cobra.Command { return scheduler.NewSchedulerCommand() },
	"kubelet":                 func() *cobra.Command { return kubelet.NewKubeletCommand(context.Background()) },
}

var others = map[string]func(){
	"door":    door,
	"etcd":    func() { etcdmain.Main(os.Args) },
	"kubectl": runKubectl,
}

func main() {
	name := filepath.Base(os.Args[0])
	if component, ok := components[name]; ok {
		os.Exit(cli.Run(component()))
	}
	if other, ok := others[name]; ok {
		other()
		return
	}
	fmt.Fprintln(os.Stderr, "call me by a link named", strings.Join(names(), ", "))
	os.Exit(2)
}

// kubectl has already said what is wrong when it returns an error, in its own way.
func runKubectl() {
	if err := cli.RunNoErrOutput(kubectl.NewDefaultKubectlCommand()); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func names() []string {
	var all []string
	for name := range components {
		all = append(all, name)
	}
	for name := range others {
		all = append(all, name)
	}
	sort.Strings(all)
	return all
}
