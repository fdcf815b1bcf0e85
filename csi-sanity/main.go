// csi-sanity with everything on: the specs are those of the pinned release, all of them and unchanged.
//
// Why not upstream's own program: one of its specs ("should succeed when creating a snapshot with accessibility
// requirements") compares two protobuf messages with reflect.DeepEqual, and so also the cache of their encoded size
// that each message holds. The one that was sent in a request has it, the one that was received has not, and no driver that says
// where its snapshots are could pass. So each answer is encoded once, which fills that cache, and nothing else changes.
package main

import (
	"context"
	"flag"
	"os"

	"github.com/kubernetes-csi/csi-test/v5/pkg/sanity"
	"github.com/onsi/ginkgo/v2"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/proto"
	"k8s.io/klog/v2"
)

type outcome struct{ failed bool }

func (o *outcome) Fail() { o.failed = true }

func fillSizeCache(
	ctx context.Context, method string, request, answer any,
	connection *grpc.ClientConn, call grpc.UnaryInvoker, options ...grpc.CallOption,
) error {
	err := call(ctx, method, request, answer, connection, options...)
	if message, ok := answer.(proto.Message); ok && err == nil {
		_, err = proto.Marshal(message)
	}
	return err
}

// One plugin at two sockets: what csi-sanity asks at the node's about the plugin as a whole, the controller answers.
func askController(address *string) grpc.UnaryClientInterceptor {
	var controller *grpc.ClientConn
	return func(
		ctx context.Context, method string, request, answer any,
		connection *grpc.ClientConn, call grpc.UnaryInvoker, options ...grpc.CallOption,
	) error {
		if *address == "" || method != "/csi.v1.Identity/GetPluginCapabilities" {
			return call(ctx, method, request, answer, connection, options...)
		}
		if controller == nil {
			var err error
			transport := grpc.WithTransportCredentials(insecure.NewCredentials())
			if controller, err = grpc.NewClient("unix:"+*address, transport); err != nil {
				return err
			}
		}
		return controller.Invoke(ctx, method, request, answer, options...)
	}
}

func main() {
	config := sanity.NewTestConfig()
	text := func(value *string, name, usage string) { flag.StringVar(value, "csi."+name, *value, usage) }
	text(&config.Address, "endpoint", "the driver's socket")
	text(&config.ControllerAddress, "controllerendpoint", "the controller's, if it is another")
	text(&config.TargetPath, "mountdir", "parent of the target paths; made and removed here")
	text(&config.StagingPath, "stagingdir", "the staging path; made and removed here")
	text(&config.SecretsFile, "secrets", "YAML of the secrets")
	text(&config.TestVolumeParametersFile, "testvolumeparameters", "YAML of the StorageClass's parameters")
	text(&config.TestVolumeMutableParametersFile, "testvolumemutableparameters", "YAML of the VolumeAttributesClass's")
	text(&config.TestSnapshotParametersFile, "testsnapshotparameters", "YAML of the VolumeSnapshotClass's")
	flag.Int64Var(&config.TestVolumeSize, "csi.testvolumesize", config.TestVolumeSize, "size of volumes")
	flag.Int64Var(&config.TestVolumeExpandSize, "csi.testvolumeexpandsize", 0, "size after growing")
	flag.Parse()

	config.TestNodeVolumeAttachLimit = true
	config.DialOptions = append(config.DialOptions, grpc.WithChainUnaryInterceptor(fillSizeCache, askController(&config.ControllerAddress)))
	klog.SetOutput(ginkgo.GinkgoWriter)

	var result outcome
	sanity.Test(&result, config)
	if result.failed {
		os.Exit(1)
	}
}
